"""Was it really split? Who computed which tokens, by the counters of the workers themselves, before and after.

After the second article: one request with a short prompt, and the counters of both workers on either side of it. A
split that happened shows one generated token and no decode time on prefill, and all the others on decode; a split that
only seemed to shows the prompt computed twice, or one worker that did it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import conditions, labels_of
from tollbridge.bench.figures import remarks
from tollbridge.bench.records import Window
from tollbridge.bench.session import Session, Traffic
from tollbridge.report.document import Document, Section, Table

TITLE = "Separation: who computed which tokens"
ARMS = ("one", "both", "split")
CELL = "separation"
_ROWS = {
    "vllm:prompt_tokens_total": "prompt tokens",
    "vllm:prefix_cache_hits_total": "of them found in its prefix cache",
    "vllm:external_prefix_cache_hits_total": "of them loaded over the wire",
    "vllm:generation_tokens_total": "generated tokens",
    "vllm:request_prefill_time_seconds_sum": "prefill time, s",
    "vllm:request_decode_time_seconds_sum": "decode time, s",
    "vllm:request_success_total": "requests ended",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sent."""

    prompt_tokens: int = 256
    """Of the request."""
    output_tokens: int = 32
    """Of the request."""


async def run(session: Session, settings: Settings) -> None:
    """Send one request by each arm."""
    for arm in session.arms:
        await session.ask(arm, schedule.fresh([0.0], 64, 4, Random(f"{session.seed} {arm}"), session.vocabulary))

    def traffic(arm: str) -> Traffic:
        rng = Random(f"{session.seed} {arm} one")
        requests = schedule.fresh([0.0], settings.prompt_tokens, settings.output_tokens, rng, session.vocabulary)
        return Traffic(requests=requests, concurrency=1)

    await session.block(CELL, 0, traffic)


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the counters say."""
    labels = labels_of(book, arms)
    windows = {window.arm: window for window in book.windows}
    last = windows[arms[-1]]
    return Document(
        title=TITLE,
        headline=_verdict(last, settings),
        lead=[
            f"One request of {settings.prompt_tokens} prompt and {settings.output_tokens} output tokens by each arm; "
            "what "
            "each worker's counters grew by."
        ],
        warnings=remarks(book.samples),
        sections=[_section(labels[arm], windows[arm]) for arm in reversed(arms) if arm in windows],
        conditions=conditions(book),
        notes=["Counters are read on the same processes before and after; other traffic would show in them."],
    )


def _verdict(window: Window, settings: Settings) -> str:
    generated = _generated(window.counters)
    if len(generated) < 2:
        return "Fewer than two workers were watched: name them with workers=URL+URL."
    if sorted(generated.values())[-2:] == [0.0, float(settings.output_tokens)]:
        return "NOT split: one worker generated every token."
    prefill = min(generated, key=lambda name: generated[name])
    decode = max(generated, key=lambda name: generated[name])
    loaded = window.counters[decode].get("vllm:external_prefix_cache_hits_total", 0.0)
    if not loaded:
        return f"NOT split: {decode} loaded no KV, so the prompt was computed twice."
    return (
        f"Split: {prefill} generated {generated[prefill]:.0f} token, {decode} all {generated[decode]:.0f}, after "
        "loading "
        f"the KV of {loaded:.0f} of {settings.prompt_tokens} prompt tokens over the wire."
    )


def _generated(counters: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: grown.get("vllm:generation_tokens_total", 0.0) for name, grown in counters.items()}


def _section(title: str, window: Window) -> Section:
    names = list(window.counters)
    rows = [
        [label, *(f"{window.counters[name].get(counter, 0.0):.4g}" for name in names)]
        for counter, label in _ROWS.items()
    ]
    return Section(title=title, table=Table(columns=["", *names], rows=rows))
