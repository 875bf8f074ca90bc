"""Puts an embedded engine together: model, cache, runner, sampler, tokenizer, transfer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import ModelInfo
from tollbridge.engine.cache import KVShape, PagedKVCache, num_blocks_for
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.engine.dtype import dtype_name
from tollbridge.engine.fingerprint import fingerprint
from tollbridge.engine.fixed import FixedDecoder
from tollbridge.engine.model import LoadedModel, load_model
from tollbridge.engine.runner import ModelRunner
from tollbridge.engine.sampler import TokenSampler
from tollbridge.engine.store import resolve_model
from tollbridge.engine.tokenizer import ModelTokenizer
from tollbridge.errors import ConfigError, StartupError
from tollbridge.transfer.base import Fingerprint, KVMemory, KVReceiver, KVSender

log = logging.getLogger(__name__)

MakeSender = Callable[[KVMemory, Fingerprint], KVSender]
MakeReceiver = Callable[[KVMemory, Fingerprint], KVReceiver]


def build_engine(
    model: str,
    config: EngineConfig,
    *,
    dtype: str = "auto",
    name: str | None = None,
    make_sender: MakeSender | None = None,
    make_receiver: MakeReceiver | None = None,
) -> EmbeddedEngine:
    """Load `model` ("smollm2", a folder or a hub id) and start an engine; the caller shuts it down.

    `name` is how requests call the model, by default `model` itself or its folder's name. `make_sender` and
    `make_receiver` get the engine's KV memory; without them the engine serves locally only. What they return belongs
    to the engine. Raises StartupError, ConfigError or UnsupportedError, each saying what to change.
    """
    folder = resolve_model(model)
    name = name or _default_name(model, folder)
    set_threads(config.threads)
    loaded = load_model(folder, name=name, dtype=dtype, device=config.device)
    cache = _allocate(loaded, config)
    info = model_info(loaded, cache.shape, config, num_blocks=cache.num_blocks)
    uses_graphs = config.cuda_graphs and loaded.device.type == "cuda"
    decoder = FixedDecoder(loaded, cache, max_rows=config.max_num_seqs) if uses_graphs else None
    runner = ModelRunner(loaded, cache, decoder=decoder)
    runner.warm_up()
    tokenizer = ModelTokenizer(folder, name=name)
    print_of_model = fingerprint(folder, cache.shape)
    memory = kv_memory(cache)
    sender = make_sender(memory, print_of_model) if make_sender else None
    receiver = make_receiver(memory, print_of_model) if make_receiver else None
    log.info("model %s: %s on %s, %d KV blocks", name, info.dtype, loaded.device, info.num_blocks)
    return EmbeddedEngine(
        info=info,
        structures=tokenizer.structures(vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids),
        config=config,
        tokenizer=tokenizer,
        runner=runner,
        sampler=TokenSampler(),
        text_streams=tokenizer.text_stream,
        sender=sender,
        receiver=receiver,
    )


def kv_memory(cache: PagedKVCache) -> KVMemory:
    """Return `cache` as transfers see it: in place on a CPU, behind a pinned ring on a GPU."""
    if cache.tensor.device.type != "cuda":
        return cache
    from tollbridge.transfer.cuda import CudaMemory

    return CudaMemory(cache.byte_layers(), block_size=cache.block_size)


def set_threads(threads: int | None) -> None:
    """Let torch use `threads` threads; None: as many as this process may use cores."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def model_info(loaded: LoadedModel, shape: KVShape, config: EngineConfig, *, num_blocks: int) -> ModelInfo:
    """Return what the door needs to know; ConfigError when `max_model_len` exceeds the model's own."""
    wanted = config.max_model_len
    if wanted is not None and wanted > loaded.max_positions:
        raise ConfigError(
            f"engine.max_model_len is {wanted}, but {loaded.name} has {loaded.max_positions} positions: lower it.",
            param="max_model_len",
        )
    return ModelInfo(
        name=loaded.name,
        max_model_len=min(wanted or loaded.max_positions, num_blocks * shape.block_size),
        vocab_size=loaded.vocab_size,
        dtype=dtype_name(loaded.dtype),
        block_size=shape.block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=shape.num_layers * shape.token_bytes,
        eos_token_ids=loaded.eos_token_ids,
    )


def _allocate(loaded: LoadedModel, config: EngineConfig) -> PagedKVCache:
    shape = KVShape(
        num_layers=loaded.num_layers,
        block_size=config.block_size,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )
    num_blocks = num_blocks_for(shape, config.kv_cache_mib << 20)
    if num_blocks < 1:
        raise ConfigError(
            f"engine.kv_cache_mib is {config.kv_cache_mib}, less than one block of {loaded.name} "
            f"({shape.block_bytes} bytes): raise it.",
            param="kv_cache_mib",
        )
    try:
        return PagedKVCache(shape, num_blocks=num_blocks, device=loaded.device)
    except RuntimeError as error:  # torch's allocators raise it, or a subclass
        raise StartupError(
            f"The KV cache of {config.kv_cache_mib} MiB could not be allocated on {loaded.device}: "
            "lower engine.kv_cache_mib."
        ) from error


def _default_name(model: str, folder: Path) -> str:
    return folder.resolve().name if Path(model).is_dir() else model
