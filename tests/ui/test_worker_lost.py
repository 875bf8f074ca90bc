"""What the page says when a worker, and then the router, is killed. The last user of the stack, hence its name."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.browser import Watched, browsing
from tests.support.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_who_is_gone_is_told_within_three_seconds(stack: Stack) -> None:
    with browsing() as browser:
        page = Watched(browser).page
        page.goto(stack.url + "/ui/")
        page.wait_for_selector(".box.ready")
        os.kill(stack.processes["p0"].ready["pid"], signal.SIGKILL)
        begun_s = time.monotonic()
        page.wait_for_selector(".alerts li[data-code=no_ready_prefill]", timeout=3000)
        assert time.monotonic() - begun_s < 3.0
        said = page.locator("#alerts").inner_text()
        assert "No ready prefill worker: everything runs local." in said
        assert "p0 is not ready." in said
        assert page.locator(".box.down").count() == 1
        stack.processes["router"].popen.kill()
        page.wait_for_selector("#live[data-state=lost]")
        assert page.locator("#live").inner_text() == "no answer from the router"
