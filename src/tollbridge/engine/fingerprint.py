"""What two processes compare before they exchange KV: same model, same weights, same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tollbridge.engine.cache import LAYOUT, KVShape
from tollbridge.engine.dtype import dtype_name
from tollbridge.errors import StartupError
from tollbridge.transfer.base import Fingerprint

NUM_SAMPLES = 8  # windows hashed per tensor: training changes every part of a tensor, so a few windows see it
SAMPLE_BYTES = 1024

# Keys of config.json that do not shape KV: who wrote it, when texts end, how training went.
IGNORED_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


def fingerprint(folder: Path, shape: KVShape) -> Fingerprint:
    """Return the fingerprint of the model in `folder` with a cache of `shape`; reads some MiB, whatever its size."""
    return Fingerprint(
        model=model_digest(folder),
        dtype=dtype_name(shape.dtype),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_dim,
        block_size=shape.block_size,
        layout=LAYOUT,
    )


def model_digest(folder: Path) -> str:
    """Return 32 hex digits over the configuration that shapes KV and samples of every tensor.

    The digest does not depend on how the tensors are spread over files.
    """
    hasher = hashlib.blake2b(digest_size=16, person=b"tollbridge-model")
    config = json.loads((folder / "config.json").read_text())
    shaping = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    hasher.update(json.dumps(shaping, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"The folder {folder} has no *.safetensors weights; convert the model first.")
    digests = dict(pair for path in files for pair in _tensor_digests(path))
    for name in sorted(digests):
        hasher.update(digests[name])
    return hasher.hexdigest()


def _tensor_digests(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, digest of name, dtype, shape and samples) of each tensor in a safetensors file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _tensor_digest(file, name, entry, data_start=8 + header_bytes)


def _tensor_digest(file: BinaryIO, name: str, entry: dict[str, Any], *, data_start: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
    start, end = entry["data_offsets"]
    for offset in _sample_offsets(end - start):
        file.seek(data_start + start + offset)
        hasher.update(file.read(min(SAMPLE_BYTES, end - start - offset)))
    return hasher.digest()


def _sample_offsets(num_bytes: int) -> list[int]:
    """Return where the samples of a tensor start: evenly spread, the first and the last bytes included."""
    last = max(0, num_bytes - SAMPLE_BYTES)
    return sorted({last * index // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)})
