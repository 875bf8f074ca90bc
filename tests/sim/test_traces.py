"""The two formats, line by line, and the files they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tollbridge.errors import ConfigError
from tollbridge.sim.files import read_scenario, read_trace
from tollbridge.sim.scenario import TraceSpec
from tollbridge.sim.traces import parse

AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
]
MOONCAKE = [
    '{"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}',
    '{"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [0, 7]}',
    '{"timestamp": 6000, "input_length": 600, "output_length": 0, "hash_ids": [9]}',
]


def spec(kind: str, **more: object) -> TraceSpec:
    return TraceSpec(format=kind, path="it", **more)  # type: ignore[arg-type]


def test_azure_has_times_and_lengths() -> None:
    first, second = parse(AZURE, spec("azure"))
    assert (first.at_s, first.num_prompt, first.num_output) == (0.0, 4808, 10)
    assert (second.num_prompt, second.num_output) == (3180, 8)
    assert second.at_s == pytest.approx(0.052)
    assert first.tokens()[:1] != second.tokens()[:1]


def test_mooncake_shares_what_has_the_same_hash_ids() -> None:
    first, second, third = parse(MOONCAKE, spec("mooncake"))
    assert [each.num_prompt for each in (first, second, third)] == [1100, 700, 600]
    assert first.tokens()[:512] == second.tokens()[:512]
    assert first.tokens()[512:700] != second.tokens()[512:700]
    assert (third.at_s, third.num_output) == (3.0, 1)  # an answer has a token at least


def test_speed_bucket_and_bound() -> None:
    fast = parse(MOONCAKE, spec("mooncake", speed=2.0, bucket_s=3.0))
    assert [each.at_s for each in fast] == [0.0, 0.75, 1.5]
    assert len(parse(AZURE, spec("azure", max_requests=1))) == 1


@pytest.mark.parametrize(
    ("kind", "lines", "where"),
    [
        ("azure", [*AZURE, "yesterday,1,2"], "Line 4"),
        ("azure", [*AZURE, "", AZURE[1].replace("4808", "-5")], "Line 5"),
        ("azure", [*AZURE, "x" * 200_000], "Line 4"),  # more than a field of the csv module holds
        ("mooncake", [MOONCAKE[0], '{"timestamp": 1}'], "Line 2"),
        ("mooncake", [MOONCAKE[0], MOONCAKE[0].replace('"timestamp": 3000', '"timestamp": 1e15')], "spans 1e[+]12 s"),
    ],
)
def test_a_line_that_does_not_fit_is_named(kind: str, lines: list[str], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        parse(lines, spec(kind))


def test_quantities_are_written_as_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "sim.yaml"
    file.write_text(
        "kv_bytes_per_token: 56 KiB\n"
        "engine: {prefill: {alpha_s: 5 ms, beta_s_per_token: 70 us}}\n"
        "network: {nic_bytes_per_s: 10 Gb/s, switch_bytes_per_s: 590 MiB/s, latency_s: 200 us}\n"
        "workload: {rate_per_s: '4'}\n"
        "failures: [{worker: w1, at_s: 1 s, down_s: 2500 ms}]\n"
    )
    scenario = read_scenario(file)
    assert scenario.kv_bytes_per_token == 57_344
    assert (scenario.engine.prefill.alpha_s, scenario.engine.prefill.beta_s_per_token) == (0.005, pytest.approx(7e-5))
    assert (scenario.network.nic_bytes_per_s, scenario.network.switch_bytes_per_s) == (1.25e9, 590 * 2**20)
    assert scenario.network.latency_s == pytest.approx(2e-4)
    assert scenario.workload.rate_per_s == 4
    assert scenario.failures[0].down_s == 2.5


@pytest.mark.parametrize(
    ("text", "key"),
    [("network: {nic_bytes_per_s: fast}", "nic_bytes_per_s"), ("duration_s: 5 GB", "duration_s")],
)
def test_a_text_that_is_no_quantity_is_named(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "sim.yaml").write_text(text)
    with pytest.raises(ConfigError, match=key):
        read_scenario(tmp_path / "sim.yaml")


def test_files_are_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("\ufeff" + "\r\n".join(AZURE))  # as a spreadsheet saves it
    file = tmp_path / "sim.yaml"
    file.write_text("fleet: [{count: 3}]\nworkload: {trace: {format: azure, path: trace.csv}}\n")
    scenario = read_scenario(file)
    assert scenario.workload.trace is not None
    assert len(read_trace(scenario.workload.trace)) == 2
    for text, word in (
        ("flet: []", "flet"),
        ("fleet: [{count: 3000}]", "3000 workers"),
        ("policies: []", "policies is empty"),
        ("duration_s: 1.0e+9\nworkload: {rate_per_s: 1.0e-6}", "duration_s is 1e[+]09"),
        ("failures: [{worker: w9, at_s: 1}]", "w9"),
        ("a: [", "not valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_scenario(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scenario(tmp_path / "none.yaml")
