"""What a token of KV weighs by the model's own config: for workers that do not say, such as stock vLLM servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tollbridge.errors import UnsupportedError
from tollbridge.kv.models import geometry


def kv_bytes_per_token(folder: Path | None, dtype: str = "auto") -> float:
    """Return the bytes in `dtype` (auto: that of the weights); 0 when there is no config.json, or an unknown model."""
    if folder is None:
        return 0.0
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        return float(geometry(config, None if dtype == "auto" else dtype).bytes_per_token)  # type: ignore[arg-type]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, UnsupportedError):
        return 0.0
