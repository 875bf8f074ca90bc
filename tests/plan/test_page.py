"""The plan's page in a browser: the verdict first, nothing to scroll sideways, nothing that Chromium or axe minds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.support.browser import Watched, browsing
from tollbridge.plan.inputs import PlanInput, read_plan
from tollbridge.plan.page import document, page
from tollbridge.plan.plan import Plan, make_plan

PLANS = Path(__file__).parents[2] / "benchmarks" / "plans"


def _plan(name: str) -> Plan:
    return make_plan(read_plan(PLANS / name))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    path.write_text(page(_plan("qwen2.5-7b-l40s.yaml")))
    return path.as_uri()


@pytest.mark.parametrize(("size", "scheme"), [((1440, 900), "light"), ((390, 844), "dark")])
def test_a_browser_shows_all_of_it(browser: Browser, written: str, size: tuple[int, int], scheme: str) -> None:
    watched = Watched(browser, size=size, scheme=scheme)
    try:
        watched.page.goto(written)
        assert watched.page.evaluate("document.documentElement.scrollWidth") == size[0]
        sideways = "[...document.querySelectorAll('.scroll')].some(part => part.scrollWidth > part.clientWidth)"
        assert not watched.page.evaluate(sideways)
        heading = watched.page.locator("h1").bounding_box()
        assert heading is not None and heading["y"] + heading["height"] < size[1] / 3  # read without scrolling
        heights = "[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height)"
        assert min(watched.page.evaluate(heights)) > 10  # pixels: the words of a plot can be read
        found = Axe().run(watched.page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
        assert watched.complaints == []
    finally:
        watched.close()


def test_one_sentence_is_the_verdict() -> None:
    both = document(_plan("qwen3-0.6b-1gbe.yaml"))
    assert both.headline == "Do not split, on either of these links."
    assert [tile.value for tile in both.tiles] == ["Do not split", "Do not split"]
    given = read_plan(PLANS / "qwen2.5-7b-l40s.yaml")
    only = document(make_plan(PlanInput(model=given.model)))
    assert only.headline == "No verdict yet: it needs the speed of an engine and of a link."
    assert only.tiles == [] and [section.title for section in only.sections] == ["KV cache", "Memory"]
