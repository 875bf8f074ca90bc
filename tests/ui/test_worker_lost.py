"""What the page says when a worker, and then the router, is killed. The last user of the stack, hence its name."""

from __future__ import annotations

import os
import signal
from inspect import signature

import pytest

from tests.support.browser import Watched, browsing
from tests.support.stack import Stack
from tollbridge.router.limits import Limits
from tollbridge.ui.hub import Hub

pytestmark = pytest.mark.slow


def test_who_is_gone_is_told_by_itself(stack: Stack) -> None:
    """At the router's next look, and in the next picture: within three seconds where nobody else wants the cores."""
    assert Limits().poll_interval_s + signature(Hub).parameters["interval_s"].default < 2.0
    with browsing() as browser:
        page = Watched(browser).page
        page.goto(stack.url + "/ui/")
        page.wait_for_selector(".box.ready")
        os.kill(stack.processes["p0"].ready["pid"], signal.SIGKILL)
        page.wait_for_selector(".alerts li[data-code=no_ready_prefill]")
        said = page.locator("#alerts").inner_text()
        assert "No ready prefill worker: everything runs local." in said
        assert "p0 is not ready." in said
        assert page.locator(".box.down").count() == 1
        stack.processes["router"].popen.kill()
        page.wait_for_selector("#live[data-state=lost]")
        assert page.locator("#live").inner_text() == "no answer from the router"
