"""Which number format the model runs in."""

from __future__ import annotations

from pathlib import Path

import torch

from tollbridge.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one is ARM's


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for `name`; "auto" is bfloat16 where the device multiplies it natively, else float32.

    Emulated bfloat16 on a CPU is several times slower than float32, so "auto" never picks it there.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_has_bf16() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known: use auto, {', '.join(DTYPES)}.", param="dtype")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has bfloat16 multiply instructions; False where the kernel does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not NATIVE_BF16_FLAGS.isdisjoint(flags.split())
