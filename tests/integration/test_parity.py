"""Split equals local equals stock transformers, token for token.

The reference runs in a separate process that imports nothing of ours. The prompts are the same in every run: a fresh
seed brings, now and then, two tokens so nearly alike that the order of a sum decides. Lengths sit around block (16) and
chunk (128) edges.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.stack import Stack, complete, record, running

NEW_TOKENS = 12
EDGES = [1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 112, 113, 127, 128, 129, 130, 143, 144, 145]
LONG = [255, 256, 257, 258, 384, 385, 500, 512, 513, 640, 777, 1000, 1024, 1025, 1500, 1999, 2000]


def lengths(rng: random.Random, count: int) -> list[int]:
    fixed = EDGES + LONG
    return fixed + [rng.randint(1, 600) for _ in range(count - len(fixed))]


def reference(model: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    script = Path(__file__).parents[1] / "support" / "reference.py"
    request = json.dumps({"prompts": prompts, "max_new_tokens": new_tokens})
    run = subprocess.run([sys.executable, "-I", str(script), str(model)], input=request, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def seed() -> int:
    return 20261130


@pytest.fixture(scope="module")
def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(4, 255) for _ in range(n)] for n in lengths(rng, 60)]


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference(tiny_model_dir, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with running(Stack(tmp_path_factory.mktemp("parity"), str(tiny_model_dir))) as running_stack:
        yield running_stack


def check(stack: Stack, seed: int, prompt: list[int], policy: str, want: list[int]) -> dict:
    """Ask by one path and compare; for a split also prove that the KV came over the wire."""
    answer = complete(stack, prompt, policy, max_tokens=NEW_TOKENS)
    where = f"seed {seed}, {len(prompt)} tokens, {policy}"
    assert answer.token_ids == want, f"{where}: {answer.token_ids} instead of {want}"
    assert answer.decision["choice"] == policy, where
    happened = record(stack, answer)["happened"]
    if policy == "split":
        assert happened["split_verified"] is True, f"{where}: {happened}"
    return happened


# The order matters: the first pass has cold caches, the later ones prefix hits on either or both sides.
@pytest.mark.parametrize("policy", ["split", "local"])
def test_alone(stack: Stack, seed: int, prompts: list[list[int]], expected: list[list[int]], policy: str) -> None:
    for prompt, want in zip(prompts, expected, strict=True):
        check(stack, seed, prompt, policy, want)


@pytest.mark.parametrize("policy", ["split", "local", "mixed"])
def test_batched(stack: Stack, seed: int, prompts: list[list[int]], expected: list[list[int]], policy: str) -> None:
    def one(index: int) -> None:
        way = ("split", "local")[index % 2] if policy == "mixed" else policy
        check(stack, seed, prompts[index], way, expected[index])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(len(prompts))))


@pytest.mark.parametrize("warm", ["prefill", "decode", "both", "neither"])
def test_prefix_hits_on_either_side(stack: Stack, seed: int, tiny_model_dir: Path, warm: str) -> None:
    """A fresh prefix is warmed directly on one worker, then a longer prompt is split."""
    from tests.support.stack import post

    rng = random.Random(f"{seed}-{warm}")
    cases = [(16, 20), (48, 49), (64, 65), (100, 130), (128, 300), (300, 301), (304, 305)]
    prefixes = [[rng.randint(4, 255) for _ in range(head)] for head, _ in cases]
    whole = [p + [rng.randint(4, 255) for _ in range(n - len(p))] for p, (_, n) in zip(prefixes, cases, strict=True)]
    want = reference(tiny_model_dir, whole, NEW_TOKENS)
    for prefix, prompt, tokens in zip(prefixes, whole, want, strict=True):
        for side, name in (("prefill", "p0"), ("decode", "d0")):
            if warm in (side, "both"):
                answer = post(stack.worker_url(name) + "/v1/completions", {"prompt": prefix, "max_tokens": 1})
                assert answer.status == 200, answer.raw
        happened = check(stack, seed, prompt, "split", tokens)
        # A prompt of h tokens leaves its full blocks in the cache; the one-token answer may complete one more.
        cached = len(prefix) // 16 * 16
        on_decode = happened["decode_report"].get("cached_tokens", 0)
        on_prefill = happened["prefill_report"].get("cached_tokens", 0)
        assert on_decode == (min(cached, len(prompt) - 1) // 16 * 16 if warm in ("decode", "both") else 0)
        assert on_prefill == (min(cached, len(prompt) - 1) // 16 * 16 if warm in ("prefill", "both") else 0)


def test_seeded_sampling_is_equal_by_split_and_by_local(stack: Stack, seed: int) -> None:
    rng = random.Random(seed + 1)
    for index, n in enumerate((5, 40, 200)):
        prompt = [rng.randint(4, 255) for _ in range(n)]
        more = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1000 + index}
        outputs = {
            policy: [complete(stack, prompt, policy, max_tokens=24, **more).token_ids for _ in range(2)]
            for policy in ("split", "local")
        }
        assert outputs["split"] == outputs["local"], f"seed {seed}"
        assert outputs["split"][0] == outputs["split"][1]
        other = complete(stack, prompt, "split", max_tokens=24, **{**more, "seed": 77}).token_ids
        assert other != outputs["split"][0]


def test_choices_share_one_load(stack: Stack, seed: int) -> None:
    """P computes the prompt, D loads it once, and each of the n sequences goes on from there as it does locally."""
    rng = random.Random(seed + 3)
    prompt = [rng.randint(4, 255) for _ in range(200)]
    more = {"temperature": 0.9, "seed": 11, "n": 3, "max_tokens": 8}
    before = stack.wire.payload_bytes, stack.metric("d0", "tollbridge:transfer_ends_total", side="receive")
    split = complete(stack, prompt, "split", **more)
    happened = record(stack, split)["happened"]
    kappa = 4 * 2 * 2 * 16 * 4  # of the tiny model: layers, K and V, heads, dimensions, bytes
    assert happened["split_verified"] is True, f"seed {seed}: {happened}"
    assert stack.wire.payload_bytes - before[0] == kappa * 199, f"seed {seed}"
    assert stack.metric("d0", "tollbridge:transfer_ends_total", side="receive") == before[1] + 1
    local = complete(stack, prompt, "local", **more)
    ids = [[choice["token_ids"] for choice in answer.json["choices"]] for answer in (split, local)]
    assert ids[0] == ids[1], f"seed {seed}"
    assert len({tuple(each) for each in ids[0]}) == 3
    assert split.json["usage"]["completion_tokens"] == 24


def test_only_decode_generates(stack: Stack, seed: int) -> None:
    """After a split P reports one generated token, D all of them."""
    before = {w: stack.metric(w, "vllm:generation_tokens_total") for w in ("p0", "d0")}
    rng = random.Random(seed + 2)
    complete(stack, [rng.randint(4, 255) for _ in range(90)], "split", max_tokens=NEW_TOKENS)
    after = {w: stack.metric(w, "vllm:generation_tokens_total") for w in ("p0", "d0")}
    assert after["p0"] - before["p0"] == 1
    assert after["d0"] - before["d0"] == NEW_TOKENS


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_split_equals_local_equals_reference(smollm2_dir: Path, tmp_path: Path) -> None:
    """The real model, 8 prompts."""
    seed = 20261130
    rng = random.Random(seed)
    prompts = [[rng.randint(100, 40_000) for _ in range(n)] for n in (1, 16, 17, 33, 64, 100, 129, 257)]
    want = reference(smollm2_dir, prompts, 8)
    with running(Stack(tmp_path, str(smollm2_dir), kv_cache_mib=128)) as stack:
        for prompt, tokens in zip(prompts, want, strict=True):
            for policy in ("split", "local"):
                answer = complete(stack, prompt, policy, max_tokens=8)
                assert answer.token_ids == tokens, f"seed {seed}, {len(prompt)} tokens, {policy}"
