"""The page in a real browser in front of a real stack: right figures, no complaint, keyboard, contrast.

One stack and one browser for all; the tests run in the order of the file.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from prometheus_client.parser import text_string_to_metric_families

from tests.support.browser import Watched, browsing
from tests.support.stack import Process, Stack, get, tollbridge
from tests.ui.conftest import ask

pytestmark = pytest.mark.slow

KEY = "a-key-for-the-page"
SERIOUS = ("serious", "critical")
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as it:
        yield it


@pytest.fixture(scope="module")
def watched(stack: Stack, browser: Browser) -> Iterator[Watched]:
    it = Watched(browser)
    it.page.goto(stack.url + "/ui/")
    it.page.wait_for_selector("#live[data-state=live]")
    yield it
    it.close()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def metric(stack: Stack, name: str, **labels: str) -> float:
    text = get(stack.url + "/metrics").decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"tollbridge_router_{name}" and labels.items() <= sample.labels.items()
    )


def until(page: Page, condition: str, argument: object = None) -> None:
    page.wait_for_function(condition, arg=argument)


def fact(page: Page, panel: str, name: str) -> str:
    """Return the figure called `name` in a panel of facts or meters."""
    found = page.locator(f"#{panel} dt, #{panel} .what").filter(has_text=re.compile(f"^{name}$"))
    return found.locator("xpath=following-sibling::*[1]").inner_text()


def digits(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def sized(text: str) -> float:
    """Return bytes from "1.23 MB"."""
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit.removesuffix("/s")]


def test_the_verdict_counts_as_the_metrics_do(stack: Stack, page: Page) -> None:
    total, split = int(metric(stack, "requests_total")), int(metric(stack, "requests_total", choice="split"))
    assert (total, split) == (13, 6)
    sentence = page.locator("#because").inner_text()
    assert f"{split} of {total} requests were split" in sentence
    toll_s = metric(stack, "toll_seconds_total")
    assert seconds(re.search(r"for (\S+ \S+) of toll", sentence)[1]) == pytest.approx(toll_s, rel=0.02)
    tiles = {
        div.locator("dt").inner_text(): div.locator(".big").inner_text() for div in page.locator("#tiles > div").all()
    }
    assert tiles["in flight"] == "0"
    assert digits(tiles["split"]) == round(100 * split / total)
    cached, known = metric(stack, "cached_prompt_tokens_real_total"), metric(stack, "cacheable_prompt_tokens_total")
    assert digits(tiles["prefix cache"]) == round(100 * cached / known)
    assert cached > 0


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[unit]


def test_transfers_are_those_of_the_metrics(stack: Stack, page: Page) -> None:
    assert fact(page, "transfers", "splits whose KV all arrived") == "6 of 6"
    assert metric(stack, "split_verified_total") == 6
    received = metric(stack, "kv_payload_bytes_total")
    assert sized(fact(page, "transfers", "received in all")) == pytest.approx(received, rel=0.01)
    assert received == stack.wire.payload_bytes  # counted on the wire
    until(page, "() => document.querySelector('#transfers .facts').innerText.includes('ended well\\n6')")
    assert fact(page, "transfers", "failed") == "0"


def test_memory_is_what_the_workers_say(stack: Stack, page: Page) -> None:
    config = re.search(r'num_gpu_blocks="(\d+)"', get(stack.worker_url("d0") + "/metrics").decode())
    assert config is not None
    assert fact(page, "memory", "d0: KV cache.*").endswith(f"of {int(config[1]) * 16:,} tokens")
    hits = stack.metric("d0", "vllm:prefix_cache_hits_total") / stack.metric("d0", "vllm:prefix_cache_queries_total")
    until(page, "(share) => document.querySelector('#memory').innerText.includes(share)", f"{hits * 100:.0f} %")
    assert "router: memory" in page.locator("#memory").inner_text()


def test_the_link_is_drawn_as_it_was_measured(stack: Stack, page: Page) -> None:
    (link,) = [each for each in json.loads(get(stack.url + "/ui/snapshot"))["links"] if each["prefill"] == "p0"]
    drawn = page.locator(".bridge text.name").text_content()
    if link.get("goodput_bytes_per_s"):
        assert sized(drawn) == pytest.approx(link["goodput_bytes_per_s"], rel=0.02)
    else:
        assert drawn == "not measured"
    assert page.locator(".box.ready").count() == 2


def test_charts_say_what_they_show(stack: Stack, page: Page) -> None:
    for chart in ("ttft", "gap", "goodput", "payoff", "even"):
        place = page.locator(f"#{chart}")
        assert place.locator("canvas").count() == 1
        assert place.get_attribute("aria-label") == page.locator(f"#{chart}-read").inner_text()
        painted = place.locator("canvas").evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v, i) => i % 4 === 3 && v)"
        )
        assert painted, chart
    rows = json.loads(get(stack.url + "/ui/snapshot"))["recent"]
    for choice in ("local", "split"):
        times = sorted(row["ttft_s"] for row in rows if row["choice"] == choice)
        shown = re.search(rf"{choice} (\S+ \S+?)[,.]", page.locator("#ttft-read").inner_text())
        assert shown is not None
        assert seconds(shown[1]) == pytest.approx(times[len(times) // 2], rel=0.05, abs=0.001)


@contextmanager
def asking(stack: Stack, policy: str) -> Iterator[None]:
    """Have one long request after the other under way: a busy browser may sleep through one."""
    enough = threading.Event()

    def run() -> None:
        while not enough.is_set():
            ask(stack, policy, [9] * 64, max_tokens=400)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_split_and_a_local_request_differ_in_shape_word_and_colour(stack: Stack, page: Page) -> None:
    for policy in ("split", "local"):
        shape = "path" if policy == "split" else "circle"
        with asking(stack, policy):
            page.wait_for_selector(f".sign.{policy} > {shape}", state="attached")
    colours = {
        policy: page.locator(f".decisions li.{policy} .mark").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for policy in ("split", "local")
    }
    assert len(set(colours.values())) == 2
    for policy in ("split", "local"):
        row = page.locator(f".decisions li.{policy}").first
        assert row.locator("summary b").inner_text() == policy
    assert page.locator(".decisions li.split .path").first.inner_text() == "p0 → d0"


def test_a_decision_opens_to_all_its_terms_by_keyboard(stack: Stack, page: Page) -> None:
    row = page.locator(".decisions li.split").first
    row.locator("summary").focus()
    page.keyboard.press("Enter")
    row.locator(".terms").wait_for()
    record = json.loads(get(f"{stack.url}/decisions/{row.get_attribute('data-id')}"))
    shown = {each.get_attribute("data-term") for each in row.locator(".terms tr").all()}
    assert set(record["decision"]["terms"]) <= shown
    assert record["decision"]["why"] in row.locator(".reason").inner_text()
    tokens = row.locator("[data-term=prompt_tokens] td").inner_text()
    assert digits(tokens) == record["decision"]["terms"]["prompt_tokens"]
    assert row.locator(".life .span.transfer").count() == 1
    page.keyboard.press("Enter")


def test_filter_and_hold(stack: Stack, page: Page) -> None:
    page.locator("#filter label", has_text="split").click()
    assert page.locator(".decisions li.local").first.is_hidden()
    page.locator("#filter label", has_text="all").click()
    page.locator("#pause").check()
    before = page.locator(".decisions li").count()
    ask(stack, "local", [33] * 30)
    total = int(metric(stack, "requests_total"))
    until(page, "(n) => document.querySelector('#because').innerText.includes(`of ${n} requests`)", total)
    assert page.locator(".decisions li").count() == before
    page.locator("#pause").uncheck()
    until(page, "(n) => document.querySelectorAll('.decisions li').length > n", before)


@pytest.mark.parametrize("path", ["split", "local"])
def test_try_it(stack: Stack, page: Page, path: str) -> None:
    page.locator("#prompt").fill("What does a bridge cost?")
    page.locator("#path").select_option(path)
    page.locator("#length").fill("12")
    with page.expect_response(lambda answer: answer.url.endswith("/chat/completions")) as answer:
        page.locator("#send").click()
    page.locator(f"#life figure.{path}").wait_for()
    kinds = {span for span in ("prefill", "transfer", "decode") if page.locator(f"#life .span.{span}").count()}
    assert kinds == ({"prefill", "transfer", "decode"} if path == "split" else {"prefill", "decode"})
    assert f"{path}, first token here after" in page.locator("#answer").inner_text()
    decision = json.loads(answer.value.headers["x-tollbridge-decision"])["id"]
    tokens = json.loads(get(f"{stack.url}/decisions/{decision}"))["happened"]["completion_tokens"]
    assert 1 <= tokens <= 12  # sampled: it may end early
    assert f"{tokens} tokens in" in page.locator("#life").inner_text()
    assert "bridge cost" not in get(stack.url + "/ui/snapshot").decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_anybody_can_use_it(stack: Stack, browser: Browser, size: str, scheme: str) -> None:
    it = Watched(browser, size=SIZES[size], scheme=scheme)
    try:
        it.page.goto(stack.url + "/ui/")
        it.page.wait_for_selector(".decisions summary")
        it.page.wait_for_selector("#ttft canvas")
        found = Axe().run(it.page).response["violations"]
        serious = [
            (each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in ("serious", "critical")
        ]
        assert serious == []
        width = it.page.evaluate("document.scrollingElement.scrollWidth")
        assert width <= SIZES[size][0], "it must not scroll sideways"
        assert it.complaints == []
    finally:
        it.close()


def test_keyboard_reaches_everything(page: Page) -> None:
    page.reload()
    page.wait_for_selector(".decisions summary")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("(e => e.id || e.className || e.tagName)(document.activeElement)"))
    assert seen[:2] == ["skip", "theme"]
    assert {"pause", "SUMMARY", "prompt", "path", "length", "send"} <= set(seen)
    page.locator("#theme").press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(stack: Stack, browser: Browser) -> None:
    config = stack.folder / "router.yaml"
    guarded = stack.folder / "guarded.yaml"
    guarded.write_text(config.read_text().replace("policy:", f"api_keys: [{KEY}]\n  policy:"))
    router = Process(tollbridge("router", "--config", str(guarded)), stack.folder / "guarded.log")
    it = Watched(browser)
    try:
        url = router.wait_ready()["url"]
        it.page.goto(url + "/ui/")
        it.page.locator("#ask[open] #key").fill("wrong")
        it.page.keyboard.press("Enter")
        it.page.locator("#ask[open] #key").fill(KEY)
        it.page.keyboard.press("Enter")
        it.page.wait_for_selector("#live[data-state=live]")
        assert KEY not in it.page.content()
        assert it.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        it.page.reload()
        it.page.wait_for_selector("#live[data-state=live]")
        assert all("401" in each for each in it.complaints), it.complaints  # the browser's own word on a refusal
    finally:
        it.close()
        router.stop()


def test_nothing_was_complained_about(watched: Watched) -> None:
    assert watched.complaints == []
