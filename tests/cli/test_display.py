"""Both displays tell every step: one line each in a log, one turning line each on a terminal."""

from __future__ import annotations

import re
import sys

import pytest

from tollbridge.cli.display import Display, LiveDisplay, PlainDisplay, make_display


def show(display: Display) -> None:
    with display:
        display.begin("p0", "starting")
        display.note("[not markup]")
        display.end("p0", "ready at http://127.0.0.1:1")


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(PlainDisplay())
    begun, note, ended = capsys.readouterr().err.splitlines()
    assert (begun, note) == ("p0: starting", "[not markup]")
    assert re.fullmatch(r"p0: ready at http://127\.0\.0\.1:1 \(0\.\d s\)", ended)


def test_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(LiveDisplay())
    err = capsys.readouterr().err
    assert "ready at http://127.0.0.1:1" in err
    assert "[not markup]" in err


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_display(), LiveDisplay)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert isinstance(make_display(), PlainDisplay)
