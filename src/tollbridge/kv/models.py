"""From a model's config.json to its KV geometry. Architectures are read by name; unknown ones are refused, not guessed.

Sources: the models' published configs and their modelling code in transformers 5.17. Missing keys have the defaults of
transformers' config classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tollbridge.errors import UnsupportedError
from tollbridge.kv import hybrids
from tollbridge.kv.geometry import DTYPE_BYTES, KVDtype, KVGeometry, Part, full, windowed
from tollbridge.kv.layers import (
    CHUNKED,
    FULL,
    SLIDING,
    attention,
    by_layer_types,
    kv_heads,
    latent_of,
    layer_kinds,
    window_of,
)
from tollbridge.kv.modelconfig import ModelConfig

Reader = Callable[[ModelConfig], list[Part]]


def geometry(values: Mapping[str, Any], kv_dtype: KVDtype | None = None) -> KVGeometry:
    """Return the KV geometry of the model that a config.json describes.

    `kv_dtype` None: the dtype of the weights, as engines choose by default. Raises UnsupportedError naming the
    architecture when it is not known, or the key when it is missing or senseless.
    """
    config = ModelConfig(values)
    reader = _READERS.get(config.model_type)
    if reader is None:
        close = difflib.get_close_matches(config.model_type, _READERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnsupportedError(
            f"The architecture {config.model_type[:60]!r} is not known here, so its KV cache cannot be sized.{hint}"
        )
    dtype = kv_dtype or _cache_dtype(config)
    parts = tuple(part for part in reader(config) if part.num_layers > 0)
    return KVGeometry(model_type=config.model_type, dtype=dtype, parts=parts)


def known_architectures() -> list[str]:
    """Return every model_type that can be sized, sorted."""
    return sorted(_READERS)


def _cache_dtype(config: ModelConfig) -> KVDtype:
    """Return the dtype that the checkpoint asks for (its KV scales are for fp8), else that of the weights."""
    quantised = config.values.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        return "fp8"
    return config.dtype if config.dtype in DTYPE_BYTES else "bfloat16"  # type: ignore[return-value]


# --- attention of one kind in every layer


def _grouped(config: ModelConfig) -> list[Part]:
    """MHA, GQA and MQA: full attention in every layer, or as `layer_types` says."""
    if config.strings("layer_types"):
        return by_layer_types(config)
    return [full(config.layers, kv_heads(config), config.head_size)]


def _multi_head(config: ModelConfig) -> list[Part]:
    """As many KV heads as query heads, whatever the config says."""
    return [full(config.layers, config.heads, config.head_size)]


def _multi_query(config: ModelConfig) -> list[Part]:
    """GPT-BigCode: one KV head where `multi_query` (its default)."""
    heads = 1 if config.flag("multi_query", True) else config.heads
    return [full(config.layers, heads, config.head_size)]


def _falcon(config: ModelConfig) -> list[Part]:
    old_names = "n_head_kv" in config.values and not config.flag("multi_query")  # RefinedWeb: Falcon-40B at first
    if config.flag("new_decoder_architecture") or old_names:
        heads = config.number("num_kv_heads", "n_head_kv", default=config.heads)
    else:
        heads = 1 if config.flag("multi_query", True) else config.heads
    return [full(config.layers, heads, config.hidden // config.heads)]


def _chatglm(config: ModelConfig) -> list[Part]:
    heads = config.number("multi_query_group_num") if config.flag("multi_query_attention") else config.heads
    return [full(config.number("num_layers", "num_hidden_layers"), heads, config.head_size)]


def _dbrx(config: ModelConfig) -> list[Part]:
    heads = config.section("attn_config").number("kv_n_heads", default=1)
    return [full(config.layers, heads, config.hidden // config.heads)]


def _mpt(config: ModelConfig) -> list[Part]:
    attn = config.section("attn_config")
    one = attn.values.get("attn_type") == "multiquery_attention"
    heads = 1 if one else attn.maybe_number("kv_n_heads") or config.heads
    return [full(config.layers, heads, config.hidden // config.heads)]


def _hunyuan(config: ModelConfig) -> list[Part]:
    """With cross-layer attention (`use_cla`) `cla_share_factor` layers in turn use the KV of the first of them."""
    share = config.number("cla_share_factor", default=1) if config.flag("use_cla") else 1
    return [full(-(-config.layers // share), kv_heads(config), config.head_size)]


def _qwen1(config: ModelConfig) -> list[Part]:
    return [full(config.layers, config.heads, config.number("kv_channels", default=config.hidden // config.heads))]


# --- sliding windows


def _all_sliding(default: int | None) -> Reader:
    """Every layer slides where there is a window (Mistral, Phi-3, Starcoder2)."""

    def read(config: ModelConfig) -> list[Part]:
        if config.strings("layer_types"):
            return by_layer_types(config)
        window = window_of(config, default)
        heads, size = config.number("num_key_value_heads", default=kv_heads(config)), config.head_size
        return [windowed(config.layers, heads, size, window) if window else full(config.layers, heads, size)]

    return read


def _qwen2(max_window_layers: int) -> Reader:
    """Sliding from layer `max_window_layers` on (the config class's default), where `use_sliding_window`."""

    def read(config: ModelConfig) -> list[Part]:
        if config.strings("layer_types"):
            return by_layer_types(config)
        window = window_of(config, 4096) if config.flag("use_sliding_window") else None
        first = config.count("max_window_layers", max_window_layers)
        kinds = [SLIDING if window and index >= first else FULL for index in range(config.layers)]
        return attention(config, kinds, window)

    return read


def _smollm3(config: ModelConfig) -> list[Part]:
    """Where `use_sliding_window`, the layers without rotary positions slide: every fourth."""
    if config.strings("layer_types"):
        return by_layer_types(config)
    window = window_of(config) if config.flag("use_sliding_window") else None
    every = config.number("no_rope_layer_interval", default=4)
    rotary = config.numbers("no_rope_layers") or [int((index + 1) % every != 0) for index in range(config.layers)]
    kinds = [FULL if flag or not window else SLIDING for flag in rotary]
    return attention(config, kinds, window)


def _alternating(
    *, period: int, full_at: int, window: int, head_dim: int | None = None, kv: int | None = None
) -> Reader:
    """One full layer in each `period`, at index `full_at`, the others sliding, unless `layer_types` says otherwise.

    `window`, `head_dim` and `kv` (KV heads) are the config class's defaults.
    """

    def read(config: ModelConfig) -> list[Part]:
        every = config.number("sliding_window_pattern", "_sliding_window_pattern", default=period)
        at = full_at if every == period else every - 1
        kinds = [FULL if index % every == at else SLIDING for index in range(config.layers)]
        size = config.maybe_number("head_dim") or head_dim or config.head_size
        heads = config.maybe_number("num_key_value_heads") or kv or config.heads
        return attention(config, layer_kinds(config) or kinds, window_of(config, window), heads=heads, size=size)

    return read


def _exaone4(config: ModelConfig) -> list[Part]:
    """`sliding_window_pattern` is a string of L(ocal) and G(lobal) that repeats, or a period; the last is global."""
    kinds = layer_kinds(config)
    pattern = config.values.get("sliding_window_pattern")
    window = window_of(config, 4096)
    if not kinds and isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(config.layers)]
        kinds[-1] = FULL
    elif not kinds:
        every = config.number("sliding_window_pattern", default=4)
        kinds = [FULL if (index + 1) % every == 0 else SLIDING for index in range(config.layers)]
    return attention(config, kinds, window)


def _llama4(config: ModelConfig) -> list[Part]:
    """Layers with rotary positions attend within chunks, every fourth (no rotary) to everything."""
    kinds = layer_kinds(config)
    if not kinds:
        rotary = config.numbers("no_rope_layers") or []  # 1: rotary, so chunked
        every = config.number("no_rope_layer_interval", default=4)
        rotary = rotary or [int((index + 1) % every != 0) for index in range(config.layers)]
        kinds = [CHUNKED if flag else FULL for flag in rotary]
    return attention(config, kinds, config.number("attention_chunk_size", default=8192))


def _gemma3n(config: ModelConfig) -> list[Part]:
    """The last `num_kv_shared_layers` reuse the KV of earlier ones and keep none."""
    kinds = layer_kinds(config) or [FULL if (index + 1) % 5 == 0 else SLIDING for index in range(config.layers)]
    kept = kinds[: len(kinds) - config.count("num_kv_shared_layers", 15)]
    return attention(config, kept, window_of(config, 512), size=config.number("head_dim", default=256))


def _gemma4(config: ModelConfig) -> list[Part]:
    """Full layers have heads of their own size and number; the last `num_kv_shared_layers` keep nothing."""
    kinds = layer_kinds(config) or [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(config.layers)]
    kept = kinds[: len(kinds) - config.count("num_kv_shared_layers")]
    heads, window = config.number("num_key_value_heads", default=4), window_of(config, 512)
    full_heads = config.maybe_number("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
    return [
        full(kept.count(FULL), full_heads or heads, config.number("global_head_dim", default=512)),
        *attention(
            config, [SLIDING] * kept.count(SLIDING), window, heads=heads, size=config.number("head_dim", default=256)
        ),
    ]


# --- latent attention


def _mla(config: ModelConfig) -> list[Part]:
    return [latent_of(config, config.layers)]


def _sparse_mla(config: ModelConfig) -> list[Part]:
    """DeepSeek-V3.2: besides, an indexer keeps a key of `index_head_dim` 8-bit numbers and a scale per 128 of them."""
    size = config.number("index_head_dim", default=128)
    indexer = Part(kind="indexer", num_layers=config.layers, elements=size + 4 * -(-size // 128), bytes_per_element=1)
    return [latent_of(config, config.layers), indexer]


def _longcat(config: ModelConfig) -> list[Part]:
    """LongCat-Flash has two latent attentions in a layer."""
    return [latent_of(config, 2 * config.number("num_layers", "num_hidden_layers"))]


def _named(reader: Reader, *model_types: str) -> dict[str, Reader]:
    return dict.fromkeys(model_types, reader)


_READERS: dict[str, Reader] = {
    **_named(
        _grouped,
        "llama", "qwen3_moe", "olmo", "olmo2", "olmoe", "flex_olmo", "granite", "granitemoe",
        "granitemoeshared",
        "stablelm", "nemotron", "cohere", "glm", "glm4", "glm4_moe", "internlm2", "internlm3", "internlm",
        "gemma", "exaone", "helium", "arcee", "apertus", "seed_oss", "ernie4_5", "ernie4_5_moe", "dots1",
        "minimax_m2", "bitnet", "diffllama", "persimmon", "phi", "aquila", "xverse", "orion",
        "minicpm", "solar_open", "ministral3", "nanochat", "jais2", "qwen3_vl_text", "qwen3_omni_moe_text",
        "qwen3_vl_moe_text", "aria_text", "telechat2", "arctic",
        "bailing_moe", "glm4v_text", "glm4v_moe_text", "hyperclovax", "mellum",
    ),
    **_named(
        _multi_head,
        "gpt2", "gptj", "gpt_neox", "opt", "bloom", "codegen", "baichuan", "biogpt", "gpt_neox_japanese",
        "openai-gpt", "gpt-sw3", "jais",
    ),
    **_named(_multi_query, "gpt_bigcode"),
    **_named(_falcon, "falcon", "RefinedWeb", "RefinedWebModel"),
    **_named(_chatglm, "chatglm"),
    **_named(_dbrx, "dbrx"),
    **_named(_mpt, "mpt"),
    **_named(_qwen1, "qwen"),
    **_named(_hunyuan, "hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    **_named(_qwen2(28), "qwen2", "qwen2_moe", "qwen3", "qwen2_5_omni_text"),
    **_named(_qwen2(80), "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    **_named(_smollm3, "smollm3"),
    **_named(_all_sliding(4096), "mistral", "ministral"),
    **_named(_all_sliding(None), "mixtral", "phi3", "phimoe", "phi4_multimodal", "phi4mm", "starcoder2"),
    **_named(_alternating(period=2, full_at=1, window=4096, head_dim=256, kv=4), "gemma2", "vaultgemma"),
    **_named(_alternating(period=6, full_at=5, window=4096, head_dim=256, kv=4), "gemma3_text", "gemma3"),
    **_named(_alternating(period=2, full_at=1, window=128, head_dim=64, kv=8), "gpt_oss"),
    **_named(_alternating(period=4, full_at=3, window=4096), "cohere2", "olmo3"),
    **_named(_exaone4, "exaone4", "exaone_moe"),
    **_named(_llama4, "llama4", "llama4_text"),
    **_named(_gemma4, "gemma4", "gemma4_text"),
    **_named(_gemma3n, "gemma3n", "gemma3n_text"),
    **_named(
        _mla,
        "deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "glm4_moe_lite", "deepseek_vl_v2",
        "pangu_ultra_moe", "youtu", "axk1",
    ),
    **_named(_sparse_mla, "deepseek_v32", "glm_moe_dsa"),
    **_named(_longcat, "longcat_flash"),
    **_named(
        hybrids.gated_delta_net, "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    ),
    **_named(hybrids.kimi_linear, "kimi_linear"),
    **_named(hybrids.pure_mamba1, "mamba", "falcon_mamba"),
    **_named(hybrids.pure_mamba2, "mamba2"),
    **_named(hybrids.jamba, "jamba"),
    **_named(hybrids.bamba, "bamba"),
    **_named(hybrids.granite_hybrid, "granitemoehybrid"),
    **_named(hybrids.falcon_h1, "falcon_h1"),
    **_named(hybrids.nemotron_h, "nemotron_h"),
    **_named(hybrids.zamba2, "zamba2"),
    **_named(hybrids.lfm2, "lfm2", "lfm2_moe"),
    **_named(hybrids.minimax, "minimax", "minimax_text_01", "minimax_m1"),
    **_named(hybrids.recurrent_gemma, "recurrent_gemma"),
}  # fmt: skip
