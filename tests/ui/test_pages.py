"""The static page: small, whole, and nothing in it that its own policy would forbid."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tollbridge.ui.pages import HEADERS, pages

MAX_BYTES = 300_000
PAGES = pages()
UNSAFE = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")


class Elements(HTMLParser):
    """Collects tags with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(PAGES["index.html"].body.decode())
    return parser.found


def test_it_is_small() -> None:
    assert sum(len(page.body) for name, page in PAGES.items() if name) < MAX_BYTES


def test_the_licence_of_what_is_vendored_comes_with_it() -> None:
    assert b"Leon Sorokin" in PAGES["vendor/uPlot.LICENSE"].body
    assert b"uPlot" in PAGES["vendor/uPlot.min.js"].body[:100]


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    for tag, attributes in elements():
        assert tag != "style"
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "script" or attributes.get("src")
        for name in ("src", "href"):
            assert not (attributes.get(name) or "").startswith(("http:", "https:", "//", "data:"))
    for name, page in PAGES.items():
        if name.endswith((".js", ".css")) and not name.startswith("vendor/"):
            text = page.body.decode()
            assert not UNSAFE.search(text), name
            assert "@import" not in text
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


def test_every_file_that_is_named_exists() -> None:
    for _, attributes in elements():
        for name in (attributes.get("src"), attributes.get("href")):
            if name and not name.startswith(("#", "../")):
                assert name in PAGES
    for name, page in PAGES.items():
        for found in re.findall(r'from "\./([^"]+)"', page.body.decode()) if name.endswith(".js") else []:
            assert found in PAGES, name


def test_every_id_that_is_used_exists() -> None:
    known = {attributes["id"] for _, attributes in elements() if "id" in attributes}
    used = {
        found
        for name, page in PAGES.items()
        if name.endswith(".js") and not name.startswith("vendor/")
        for found in re.findall(r'byId\("([^"]+)"\)', page.body.decode())
    }
    assert used <= known


def test_the_policy_allows_no_inline_code() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
