from __future__ import annotations

from pathlib import Path

import pytest

from tollbridge.config.calibration import read_calibration
from tollbridge.errors import ConfigError


def test_reads_what_the_design_describes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(
        '{"version": 1, "engines": {"p0": {"prefill": {"alpha_s": 0.01, "beta_s_per_token": 0.001,'
        ' "gamma_s_per_token2": 0.0, "residual": 0.05},'
        ' "decode": {"step_s": 0.05, "per_decode_s": 0.001}, "samples": []}},'
        ' "links": {"node-a>node-b": {"goodput_bytes_per_s": 1e8, "raw_bytes_per_s": 1.1e8, "rtt_s": 0.001,'
        ' "streams": 1, "samples": []}}, "measured_at": "2026-11-29T00:00:00Z"}'
    )
    calibration = read_calibration(path)
    assert calibration.engines["p0"].prefill.beta_s_per_token == 0.001
    assert calibration.links["node-a>node-b"].goodput_bytes_per_s == 1e8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist: run `tollbridge probe`"),
        ("{", "is malformed"),
        ('{"engines": {"p0": {}}}', "is malformed: Object missing required field `prefill`"),
        ('{"links": {"a>b": {"goodput_bytes_per_s": 0}}}', "is malformed"),
        ('{"version": 2}', "has version 2"),
    ],
)
def test_says_in_one_sentence_what_is_wrong(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_calibration(path)
    assert caught.value.message.startswith(f"The calibration file {path}")
