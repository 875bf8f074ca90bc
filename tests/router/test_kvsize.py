"""A token's KV by the model's config, for workers that do not say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tollbridge.clock import ManualClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.router.fleet import Fleet
from tollbridge.router.kvsize import kv_bytes_per_token
from tollbridge.router.load import Report
from tollbridge.router.reports import from_metrics

QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
}  # fmt: skip
STOCK = b'vllm:num_requests_running{engine="0"} 1.0\n'


@pytest.mark.parametrize(("dtype", "size"), [("auto", 57_344), ("bfloat16", 57_344), ("float32", 114_688)])
def test_the_articles_model(tmp_path: Path, dtype: str, size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert kv_bytes_per_token(tmp_path, dtype) == size


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "of-tomorrow"}', '{"model_type": "qwen2"}'])
def test_what_cannot_be_sized_is_not_known(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert kv_bytes_per_token(tmp_path) == 0.0
    assert kv_bytes_per_token(None) == 0.0


def test_it_stands_in_until_a_worker_says() -> None:
    fleet = Fleet([WorkerConfig(name="v", engine="vllm", url="http://v:1")], clock=ManualClock(), kv_bytes_per_token=7)
    worker = fleet["v"]
    assert fleet.view_of(worker).kv_bytes_per_token == 7
    told = from_metrics(STOCK, known=worker.load.report)
    assert told is not None
    worker.load.told(told, 0.0)
    assert fleet.view_of(worker).kv_bytes_per_token == 7
    worker.load.told(Report(kv_bytes_per_token=9), 1.0)
    assert fleet.view_of(worker).kv_bytes_per_token == 9
    assert fleet.enter(WorkerConfig(name="w", url="http://w:1")).load.report.kv_bytes_per_token == 7
