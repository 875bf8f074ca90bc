"""The runner continues a prompt exactly as stock transformers does, however it is chunked, batched and placed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.driver import Bench, generate, make_bench

NEW_TOKENS = 12
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 100, 130, 257]
CHUNKS = [1, 15, 16, 17, 31, 33, 100, 512]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]

REFERENCE = Path(__file__).parents[1] / "support" / "reference.py"


def reference(folders: list[Path], prompts: list[list[int]], new_tokens: int) -> list[list[list[int]]]:
    request = json.dumps({"prompts": prompts, "max_new_tokens": new_tokens})
    command = [sys.executable, "-I", str(REFERENCE), *map(str, folders)]
    run = subprocess.run(command, input=request, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(20)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(family_dirs: dict[str, Path], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    answers = reference(list(family_dirs.values()), prompts, NEW_TOKENS)
    return dict(zip(family_dirs, answers, strict=True))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def bench(family: str, family_dirs: dict[str, Path]) -> Bench:
    return make_bench(family_dirs[family])


def test_the_reference_says_something(expected: dict[str, list[list[int]]]) -> None:
    for answers in expected.values():
        assert len({tuple(answer) for answer in answers}) == len(LENGTHS)
        assert all(len(set(answer)) > NEW_TOKENS // 2 for answer in answers)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_batched(bench: Bench, family: str, prompts, expected, chunk: int) -> None:
    assert generate(bench, prompts, NEW_TOKENS, chunk=chunk, scattered=chunk) == expected[family]


@pytest.mark.parametrize("scattered", [None, 3])
def test_alone(bench: Bench, family: str, prompts, expected, scattered: int | None) -> None:
    for prompt, want in zip(prompts, expected[family], strict=True):
        assert generate(bench, [prompt], NEW_TOKENS, scattered=scattered) == [want]


def test_neighbouring_blocks(bench: Bench, family: str, prompts, expected) -> None:
    """Contexts in one run of blocks are read in place."""
    assert generate(bench, prompts, NEW_TOKENS, chunk=64, scattered=None) == expected[family]


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_sizes(family_dirs, prompts, expected, block_size: int) -> None:
    bench = make_bench(family_dirs["llama"], num_blocks=1024, block_size=block_size)
    assert generate(bench, prompts, NEW_TOKENS, chunk=33) == expected["llama"]


@pytest.mark.model
def test_smollm2(smollm2_dir: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(17, 49152) for _ in range(length)] for length in (1, 17, 70)]
    (want,) = reference([smollm2_dir], prompts, 6)
    bench = make_bench(smollm2_dir, num_blocks=32)
    assert generate(bench, prompts, 6, chunk=33) == want
