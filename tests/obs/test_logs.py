"""Log lines: one record a line, fields quoted where needed, JSON when asked for."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from tollbridge.obs.logs import configure, request_line


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tollbridge")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def logged(**options: object) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    configure(stream=stream, **options)
    return stream, logging.getLogger("tollbridge.test")


def test_key_values() -> None:
    stream, logger = logged()
    request_line(logger, request="cmpl-1", role="local", ttft_s=0.123456789, tokens=3, missing=None)
    assert stream.getvalue().endswith(
        "Z INFO tollbridge.test request request=cmpl-1 role=local ttft_s=0.123457 tokens=3\n"
    )


def test_a_value_cannot_forge_a_line_or_a_field() -> None:
    stream, logger = logged()
    request_line(logger, error='a "b" role=admin\nnext')
    assert stream.getvalue().count("\n") == 1
    assert 'error="a \\"b\\" role=admin\\nnext"' in stream.getvalue()


def test_json() -> None:
    stream, logger = logged(json=True)
    request_line(logger, request="cmpl-1", tokens=3, missing=None)
    line = json.loads(stream.getvalue())
    assert line["time"].endswith("Z")
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "tollbridge.test", "request")
    assert (line["request"], line["tokens"]) == ("cmpl-1", 3)
    assert "missing" not in line


@pytest.mark.parametrize("as_json", [False, True])
def test_tracebacks_are_kept(as_json: bool) -> None:
    stream, logger = logged(json=as_json)
    try:
        raise KeyError("inner")
    except KeyError:
        logger.exception("failed")
    assert "KeyError" in stream.getvalue()


def test_levels() -> None:
    stream, logger = logged(level="WARNING")
    request_line(logger, request="cmpl-1")
    logging.getLogger("aiohttp").info("chatter")
    assert stream.getvalue() == ""
    logging.getLogger("aiohttp").warning("trouble")
    assert "trouble" in stream.getvalue()


def test_configuring_twice_writes_once() -> None:
    logged()
    stream, logger = logged()
    logger.info("once")
    assert stream.getvalue().count("once") == 1
