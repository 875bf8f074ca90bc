import pytest

from tollbridge.config.quantity import parse_bytes, parse_rate, parse_seconds, show_bytes, show_rate, show_seconds
from tollbridge.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("589.6 MiB/s", 589.6 * 2**20),
        ("110 MB/s", 110e6),
        ("4.6 Gb/s", 4.6e9 / 8),
        ("10Gbps", 1.25e9),
        ("1 GB/s", 1e9),
        ("4.61 Gib/s", 4.61 * 2**30 / 8),
        (5e6, 5e6),
        ("5e6", 5e6),
        ("1 GbE", 0.94 * 1e9 / 8),
    ],
)
def test_rates(text: str | float, expected: float) -> None:
    assert parse_rate(text, "x") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "-1 GB/s", "1 GB", "1 parsec/s", True, "nan"])
def test_a_rate_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"links\.a"):
        parse_rate(text, "links.a")


def test_sizes_and_times() -> None:
    assert parse_bytes("3584 MiB", "x") == 3584 * 2**20
    assert parse_bytes("10 GB", "x") == 1e10
    assert parse_seconds("73.2 us", "x") == pytest.approx(73.2e-6)
    assert parse_seconds("138 ms", "x") == pytest.approx(0.138)
    with pytest.raises(ConfigError, match="memory"):
        parse_bytes("3584 miles", "memory")
    with pytest.raises(ConfigError, match="step"):
        parse_seconds("1 fortnight", "step")


def test_shown_with_three_digits() -> None:
    assert show_bytes(271_925_248) == "272 MB"
    assert show_rate(618_250_000) == "618 MB/s (4.95 Gb/s)"
    assert [show_seconds(s) for s in (2.4123, 0.138, 73.2e-6, 0.9999)] == ["2.41 s", "138 ms", "73.2 us", "1e+03 ms"]
