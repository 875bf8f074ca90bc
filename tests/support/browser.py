"""A headless Chromium for tests: Debian's, or the one that Playwright has fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "TOLLBRIDGE_CHROMIUM"


def find(playwright: Playwright) -> str | None:
    """Return the program: the one that TOLLBRIDGE_CHROMIUM names, one in the path, or Playwright's own."""
    named = [os.environ.get(VARIABLE), *map(shutil.which, NAMES), playwright.chromium.executable_path]
    return next((path for path in named if path and Path(path).exists()), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Yield a browser. Without one the test fails where one could be installed, and is skipped where it could not."""
    with sync_playwright() as playwright:
        path = find(playwright)
        if path is None:
            sentence = f"no Chromium: apt-get install chromium, or name one with {VARIABLE}"
            if os.geteuid() == 0 or os.environ.get("CI"):
                pytest.fail(f"{sentence} (make test does that when it runs as root)", pytrace=False)
            pytest.skip(f"{sentence}; only root can, and this is not root")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
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
        self.page.set_default_timeout(10_000)
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
