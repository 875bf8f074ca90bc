"""`tollbridge top` against a real router: the page's figures, in a terminal's words."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console

from tests.support.router_rig import rig
from tollbridge.cli.main import run
from tollbridge.cli.top import decode
from tollbridge.cli.top_view import duration, screen, size
from tollbridge.errors import UpstreamError
from tollbridge.ui.mount import mount

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True}


def printed(body: bytes) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(screen(decode(body)))
    return console.export_text()


async def test_one_screen() -> None:
    async with rig(extensions=[mount]) as r:
        for policy in ("split", "local"):
            await r.post(STREAM, policy=policy)
        r["p0"].healthy = False
        await r.until("/ui/snapshot", lambda now: not now["workers"][0]["ready"])
        text = printed((await r.get("/ui/snapshot")).body)
        assert "1 of 2 requests were split" in text
        assert "problem: No ready prefill worker: everything runs local." in text
        assert "◆ split" in text
        assert "● local" in text
        assert "p0 → d0" in text
        assert "not ready" in text


async def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async with rig(extensions=[mount]) as r:
        await r.post(STREAM, policy="split")
        assert await asyncio.to_thread(run, ["top", "--url", r.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["totals"]["split"] == 1
        assert await asyncio.to_thread(run, ["top", "--url", r.url, "--once"]) == 0
        assert "1 of 1 requests were split" in capsys.readouterr().out


async def test_what_goes_wrong_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    async with rig(extensions=[mount], api_keys=["k"]) as r:
        assert await asyncio.to_thread(run, ["top", "--url", r.url, "--json"]) == 2
        assert "set TOLLBRIDGE_API_KEY" in capsys.readouterr().err
    async with rig() as r:
        assert await asyncio.to_thread(run, ["top", "--url", r.url, "--json"]) == 1
        assert "There is no dashboard" in capsys.readouterr().err
    assert await asyncio.to_thread(run, ["top", "--url", "http://127.0.0.1:1", "--json"]) == 1
    assert "is the router running?" in capsys.readouterr().err
    with pytest.raises(UpstreamError, match="no router of this version"):
        decode(b'{"v": 1}')


def test_figures() -> None:
    assert [duration(each) for each in (None, 0.0123, 1.5, 600)] == ["-", "12.3 ms", "1.5 s", "10 min"]
    assert [size(each) for each in (5, 1500, 2.5e6, 3e9)] == ["5 B", "1.5 kB", "2.5 MB", "3 GB"]
