from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tollbridge.engine import dtype
from tollbridge.engine.dtype import dtype_name, resolve_dtype
from tollbridge.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_names_round_trip(name: str) -> None:
    assert dtype_name(resolve_dtype(name, CPU)) == name


@pytest.mark.parametrize(("native", "want"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_follows_the_instruction_set(monkeypatch: pytest.MonkeyPatch, native: bool, want) -> None:
    monkeypatch.setattr(dtype, "_cpu_has_bf16", lambda: native)
    assert resolve_dtype("auto", CPU) is want


def test_auto_on_a_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("model name : x\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_reads_cpuinfo(tmp_path: Path, text: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert dtype._cpu_has_bf16(tmp_path / "cpuinfo") is has


def test_no_cpuinfo(tmp_path: Path) -> None:
    assert dtype._cpu_has_bf16(tmp_path / "absent") is False


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="'int4' is not known"):
        resolve_dtype("int4", CPU)
