"""A headless Chromium for tests: Debian's, or the one that Playwright has fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from benchmarks.support.browser import VARIABLE, arguments, find
from playwright.sync_api import Browser, Page, sync_playwright


@contextmanager
def browsing() -> Iterator[Browser]:
    """Yield a browser. Without one the test fails where one could be installed, and is skipped where it could not."""
    with sync_playwright() as playwright:
        path = find(playwright.chromium.executable_path)
        if path is None:
            sentence = f"no Chromium: apt-get install chromium, or name one with {VARIABLE}"
            if os.geteuid() == 0 or os.environ.get("CI"):
                pytest.fail(f"{sentence} (make test does that when it runs as root)", pytrace=False)
            pytest.skip(f"{sentence}; only root can, and this is not root")
        browser = playwright.chromium.launch(executable_path=path, args=arguments())
        try:
            yield browser
        finally:
            with suppress(Exception):
                browser.close()


class Watched:
    """A page that remembers everything its browser complained about, violations of its policy included."""

    def __init__(self, browser: Browser, *, size: tuple[int, int] = (1440, 900), scheme: str = "light") -> None:
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("console", lambda each: self._note(each.type, each.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda each: self._fail(each.url, each.failure or ""))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _fail(self, url: str, why: str) -> None:
        if "ERR_ABORTED" not in why:  # a page that is left takes its stream along
            self.complaints.append(f"{url} {why}")

    def close(self) -> None:
        self.context.close()
