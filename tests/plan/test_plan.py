"""The plan against calculations made here in another way, for inputs drawn at random."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.errors import ConfigError, UnsupportedError
from tollbridge.plan.inputs import LinkInput, PlanInput, read_model, read_plan
from tollbridge.plan.plan import Plan, make_plan
from tollbridge.plan.prefill import Prefill, Sample
from tollbridge.plan.published import mooncake_bandwidth
from tollbridge.plan.text import memory_text

LAYERS, HEADS, SIZE = 28, 4, 128
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": HEADS,
} | {
    "hidden_size": 28 * SIZE,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
KAPPA = 2 * LAYERS * HEADS * SIZE * 2


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def _input(model: str, **values: Any) -> PlanInput:
    plan: dict[str, Any] = {
        "model": model,
        "engine": {"prefill": {"per_token": "70 us"}, "decode": {"step": "20 ms"}},
        "links": [{"name": "wire", "goodput": "600 MB/s"}],
        "workload": {"prompt_tokens": [2048], "output_tokens": 128, "concurrency": 4},
    }
    return msgspec.convert(plan | values, PlanInput)


def _only(plan: Plan) -> Any:
    return plan.links[0].lengths[0]


def test_a_model_alone_gives_its_kv(model: str) -> None:
    plan = make_plan(PlanInput(model=model, kv_dtype="fp8"))
    assert plan.kv.bytes_per_token == KAPPA // 2
    assert plan.kv.bytes_at["1024"] == 512 * KAPPA
    assert plan.links == []


@given(
    per_token_us=st.floats(5, 500),
    goodput=st.floats(1e7, 1e11),
    tokens=st.integers(16, 20_000),
    concurrency=st.integers(1, 64),
)
def test_the_terms_agree_with_a_simulation(
    per_token_us: float, goodput: float, tokens: int, concurrency: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    given_input = _input(
        str(folder),
        engine={"prefill": {"per_token": f"{per_token_us} us"}, "decode": {"step": "20 ms"}},
        links=[{"goodput": goodput}],
        workload={"prompt_tokens": [tokens], "output_tokens": 128, "concurrency": concurrency},
    )
    terms = _only(make_plan(given_input)).terms
    prefill_s = per_token_us * 1e-6 * tokens
    assert terms.kv_bytes == KAPPA * tokens
    assert terms.prefill_s == pytest.approx(prefill_s, rel=1e-6)
    assert terms.break_even_bytes_per_s == pytest.approx(KAPPA / (per_token_us * 1e-6), rel=1e-6)
    # layer by layer: pieces of equal size leave at equal distances and cross a link one after the other
    pieces, clock = LAYERS * math.ceil(tokens / 2048), 0.0
    for piece in range(1, pieces + 1):
        clock = max(clock, prefill_s * piece / pieces) + KAPPA * tokens / pieces / goodput
    assert terms.toll_s[0] == pytest.approx(clock - prefill_s + 0.020 + 0.005, rel=1e-6, abs=1e-9)
    assert terms.toll_sequential_s[0] == pytest.approx(KAPPA * tokens / goodput + 0.025, rel=1e-6)
    assert terms.ttft_burst_sequential_s[0] == pytest.approx(concurrency * (prefill_s + KAPPA * tokens / goodput))
    stall = sum(max(per_token_us * 1e-6 * min(2048, tokens - at) - 0.020, 0) for at in range(0, tokens, 2048))
    assert terms.bought_s == pytest.approx(concurrency / 2 * stall / 128 / 0.1 * 2.0, rel=1e-6, abs=1e-9)


def test_the_link_that_flips_is_where_the_verdict_changes(model: str) -> None:
    slow = _only(make_plan(_input(model, links=[{"goodput": 1e8}]))).verdict
    assert slow.answer == "never"
    flips = slow.flips_at_bytes_per_s
    just_below = _only(make_plan(_input(model, links=[{"goodput": flips * 0.999}]))).verdict
    just_above = _only(make_plan(_input(model, links=[{"goodput": flips * 1.001}]))).verdict
    assert just_below.answer == "never"
    assert just_above.answer in ("sometimes", "always")


def test_the_streams_that_flip_are_where_the_verdict_changes(model: str) -> None:
    few = _input(model, links=[{"goodput": "5 GB/s"}], workload={"prompt_tokens": [512], "concurrency": 1})
    verdict = _only(make_plan(few)).verdict
    assert verdict.answer == "never"
    needed = math.ceil(2 * verdict.flips_with_streams_per_gpu)
    many = _input(model, links=[{"goodput": "5 GB/s"}], workload={"prompt_tokens": [512], "concurrency": needed})
    assert _only(make_plan(many)).verdict.answer == "sometimes"


def test_a_ttft_over_its_slo_is_never_split(model: str) -> None:
    verdict = _only(make_plan(_input(model, links=[{"goodput": "50 MB/s"}]))).verdict
    assert verdict.answer == "never"
    assert "over the SLO" in verdict.why


@given(st.floats(0.05, 40), st.sampled_from(["100 MB/s", "1 GB/s", "10 GB/s"]), st.integers(2, 8))
def test_what_a_link_is_offered_for_ever_it_must_carry(
    tmp_path_factory: pytest.TempPathFactory, rate: float, goodput: str, gpus: int
) -> None:
    """Requests x KV over the workers of the smaller role, beside the goodput: an own calculation."""
    folder = tmp_path_factory.mktemp("m")
    (folder / "config.json").write_text(json.dumps(MODEL))
    work = {"prompt_tokens": [2048, 4096], "output_tokens": 16, "concurrency": 64, "requests_per_s": rate}
    link = {"name": "wire", "goodput": goodput}
    found = make_plan(_input(str(folder), workload=work, links=[link], gpus=gpus)).links[0]
    calm = make_plan(_input(str(folder), workload={**work, "requests_per_s": None}, links=[link], gpus=gpus)).links[0]
    assert found.ratio is not None
    for length, alone in zip(found.lengths, calm.lengths, strict=True):
        kv = length.terms.prompt_tokens * KAPPA
        offered = rate / 2 * kv / min(found.ratio.prefill, found.ratio.decode)
        assert length.verdict.offered_bytes_per_s == pytest.approx(offered)
        if offered >= found.link.high:
            assert length.verdict.answer not in ("sometimes", "always")
            assert "queue without end" in length.verdict.why
        else:
            assert length.verdict.answer == alone.verdict.answer
        assert alone.verdict.offered_bytes_per_s == 0.0


def test_a_saturated_link_is_named_with_what_would_do(model: str) -> None:
    work = {"prompt_tokens": [4096], "output_tokens": 16, "concurrency": 64}
    links = [{"name": "wire", "goodput": "1 GB/s"}]
    calm = make_plan(_input(model, workload=work, links=links)).links[0]
    assert calm.lengths[0].verdict.answer in ("sometimes", "always")
    full = make_plan(_input(model, workload={**work, "requests_per_s": 6}, links=links)).links[0]
    assert (full.lengths[0].verdict.answer, full.verdict.answer) == ("never", "do not split")
    needed = 6 * 4096 * KAPPA
    assert full.verdict.flips_at_bytes_per_s == pytest.approx(needed)
    assert "more than wire carries" in full.verdict.why
    enough = [{"name": "wire", "goodput": f"{1.01 * needed / 1e6:.3f} MB/s"}]
    again = make_plan(_input(model, workload={**work, "requests_per_s": 6}, links=enough)).links[0]
    assert again.lengths[0].verdict.answer in ("sometimes", "always")


def test_chunking_is_named_where_it_is_enough(model: str) -> None:
    work = {"prompt_tokens": [8192], "concurrency": 2}
    plan = _input(model, links=[{"goodput": "50 MB/s"}], workload=work, slo={"itl_p99_s": 0.05})
    verdict = _only(make_plan(plan)).verdict
    assert verdict.answer == "chunked prefill is enough"
    assert verdict.chunk_tokens is not None
    assert 70e-6 * verdict.chunk_tokens <= 0.05 < 70e-6 * (verdict.chunk_tokens + 64)


def test_what_prefill_has_cached_must_cross_the_link_all_the_same(model: str) -> None:
    work = {"prompt_tokens": [2048], "cached_fraction": 0.75}
    cached = _only(make_plan(_input(model, workload=work))).terms
    cold = _only(make_plan(_input(model))).terms
    assert cached.kv_bytes == cold.kv_bytes
    assert cached.prefill_s == pytest.approx(cold.prefill_s / 4)
    assert cached.toll_s[0] > cold.toll_s[0]


@given(share=st.floats(0.05, 0.95), goodput=st.floats(5e7, 5e9), tokens=st.integers(64, 20_000))
def test_cached_kv_crosses_while_the_rest_is_computed(
    share: float, goodput: float, tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Piece by piece, on a prefill whose later tokens cost more; and the link that flips is where the toll is paid."""
    folder = tmp_path_factory.getbasetemp() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    prefill = Prefill([Sample(tokens=2_000, seconds=0.1), Sample(tokens=20_000, seconds=3.0)])
    engine = {"prefill": {"samples": prefill.samples}, "decode": {"step": "20 ms"}}
    work = {"prompt_tokens": [tokens], "concurrency": 24, "output_tokens": 16, "cached_fraction": share}
    slo = {"ttft_s": 60}

    def planned(rate: float) -> Any:
        return _only(make_plan(_input(str(folder), engine=engine, workload=work, slo=slo, links=[{"goodput": rate}])))

    found = planned(goodput)
    cached, took_s = int(share * tokens), prefill.seconds(tokens) - prefill.seconds(int(share * tokens))
    fresh, pieces = (tokens - cached) * KAPPA, LAYERS * math.ceil((tokens - cached) / 2048)
    clock = cached * KAPPA / goodput
    for piece in range(1, pieces + 1):
        clock = max(clock, took_s * piece / pieces) + fresh / pieces / goodput
    assert found.terms.toll_s[0] == pytest.approx(clock - took_s + 0.025, rel=1e-6)
    edges = [*range(cached, tokens, 2048), tokens]
    stall = sum(max(prefill.seconds(b) - prefill.seconds(a) - 0.020, 0) for a, b in pairwise(edges))
    assert found.terms.stall_s == pytest.approx(stall, rel=1e-6, abs=1e-9)
    flips = found.verdict.flips_at_bytes_per_s
    if flips is not None and flips > 1:
        assert planned(flips * 0.999).verdict.answer not in ("sometimes", "always")
        assert planned(flips * 1.001).verdict.answer in ("sometimes", "always")


def test_memory(model: str) -> None:
    memory = {"process": "2500 MiB", "limit": "3584 MiB", "ring": "64 MiB"}
    made = make_plan(_input(model, memory=memory)).memory
    assert made is not None
    assert made.needed == pytest.approx(1.15 * 2564 * 2**20)
    assert made.staged == 4 * 2048 * KAPPA
    assert made.requests_until_killed == int(1084 * 2**20 // (2048 * KAPPA)) + 1
    assert made.fits


def test_a_gpu_of_the_catalogue_is_marked_as_assumed(model: str) -> None:
    plan = make_plan(_input(model, engine={"gpu": "l40s"}))
    assert any("data sheet" in sentence for sentence in plan.assumed)
    assert _only(plan).terms.prefill_us_per_token == pytest.approx(73, rel=0.15)  # measured elsewhere: 67 to 76


def test_ratio_balances_the_roles(model: str) -> None:
    work = {"prompt_tokens": [4096], "output_tokens": 16, "requests_per_s": 2.0}
    ratio = make_plan(_input(model, gpus=8, workload=work)).links[0].ratio
    assert ratio is not None
    assert ratio.prefill + ratio.decode == 8
    assert ratio.prefill_needed == pytest.approx(2.0 * 4096 * 70e-6)
    assert ratio.prefill > ratio.decode


def test_mooncake() -> None:
    common: dict[str, Any] = {"num_tokens": 8192, "hidden_size": 8192, "gqa": 8}
    assert mooncake_bandwidth(flops=8 * 312e12, **common) == pytest.approx(6e9, rel=0.05)
    assert mooncake_bandwidth(flops=8 * 989e12, **common) == pytest.approx(19e9, rel=0.05)


def test_prefill_goes_through_its_points() -> None:
    prefill = Prefill([Sample(tokens=1000, seconds=0.1), Sample(tokens=3000, seconds=0.4)])
    assert [prefill.seconds(n) for n in (0, 500, 1000, 2000, 3000, 5000)] == pytest.approx(
        [0, 0.05, 0.1, 0.25, 0.4, 0.7]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"links": [{"goodput": "0 MB/s"}]}, "goodput must be one rate of 1 B/s or more"),
        ({"links": [{"goodput": ["1 MB/s", "2 MB/s", "3 MB/s"]}]}, "lowest and the highest"),
        ({"links": [{"goodput": "1e300 B/s"}]}, "give a rate such as"),
        ({"engine": {"prefill": {"per_token": "1e-300 s"}}}, "Prefill needs measured points"),
        ({"engine": {"prefill": {"per_token": "1e300 s"}}}, "give a time such as"),
        ({"engine": {"gpu": "abacus"}}, "abacus"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"model": "/nowhere"}, "config.json"),
    ],
)
def test_senseless_inputs_get_one_sentence(model: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(_input(**({"model": model} | values)))


def test_a_transport_that_stages_nothing_is_never_killed(model: str) -> None:
    memory = make_plan(_input(model, memory={"limit": "16 GiB", "staging_copies": 0})).memory
    assert memory is not None and memory.requests_until_killed is None
    tight = make_plan(_input(model, memory={"limit": "1 GiB", "process": "2 GiB", "staging_copies": 0})).memory
    assert tight is not None and not tight.fits_unbounded and "killed" not in memory_text(tight).plain


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceiver9000", "num_hidden_layers": 3}')
    with pytest.raises(UnsupportedError, match="perceiver9000"):
        make_plan(PlanInput(model=str(tmp_path)))


def test_files(tmp_path: Path, model: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: config.json\nlinks: [{goodput: 1 GB/s}]\n")
    assert read_plan(path).links == [LinkInput(goodput="1 GB/s")]
    assert read_model(read_plan(path).model or "") == MODEL
    path.write_text("modle: x\n")
    with pytest.raises(ConfigError, match="modle"):
        read_plan(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="YAML"):
        read_plan(path)
