"""A plan for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollbridge.config.quantity import show_bytes, show_rate, show_seconds
from tollbridge.plan.memory import Memory
from tollbridge.plan.plan import Kv, Length, OnLink, Plan
from tollbridge.plan.ratio import Ratio

COLOURS = {"do not split": "bold red", "split some requests": "bold yellow", "split": "bold green"} | {
    "never": "red",
    "chunked prefill is enough": "cyan",
    "sometimes": "yellow",
    "always": "green",
}


def render(plan: Plan) -> RenderableType:
    """Return what `rich` prints: sizes first, then a verdict per link with the terms that led to it."""
    parts: list[RenderableType] = [Text(kv_text(plan.kv))]
    for link in plan.links:
        parts += [Text(""), *_link(link)]
    if not plan.links:
        parts.append(
            Text(
                "\nFor a verdict, give the speed of the engine (--prefill-per-token, --gpu or --calibration) "
                "and of the link (--goodput)."
            )
        )
    if plan.memory is not None:
        parts += [Text(""), memory_text(plan.memory)]
    parts += [Text(f"Assumed: {sentence}", style="dim") for sentence in plan.assumed]
    return Group(*parts)


def kv_text(kv: Kv) -> str:
    """Return the bytes of a token and of some requests."""
    text = f"KV of {kv.model_type} in {kv.dtype}: {kv.bytes_per_token:,} bytes a token"
    if kv.bytes_per_token_long != kv.bytes_per_token:
        text += f", {kv.bytes_per_token_long:,} beyond the window of {', '.join(map(str, kv.windows))} tokens"
    if kv.fixed_bytes:
        text += f", and {show_bytes(kv.fixed_bytes)} of state a request"
    at = ", ".join(
        f"{int(tokens):,}: {show_bytes(size)}" for tokens, size in sorted(kv.bytes_at.items(), key=lambda i: int(i[0]))
    )
    return f"{text}.\nA request of {at}."


def _link(link: OnLink) -> list[RenderableType]:
    verdict = link.verdict
    title = Text.assemble(
        (verdict.answer.capitalize(), COLOURS[verdict.answer]), f" on {link.link.name}. {verdict.why}"
    )
    lines: list[RenderableType] = [title, Text(f"Break-even: {break_even_text(link)}."), _table(link)]
    lines += [Text(f"{length.terms.prompt_tokens:,} tokens: {length.verdict.why}") for length in link.lengths]
    if link.ratio is not None:
        lines.append(Text(ratio_text(link.ratio)))
    return lines


def break_even_text(link: OnLink) -> str:
    """Return the rate at which the wire keeps up with prefill, over the lengths."""
    low, high = map(show_rate, link.break_even_bytes_per_s)
    return low if low == high else f"{low} to {high}"


def ratio_text(ratio: Ratio) -> str:
    """Return how many GPUs should prefill."""
    return (
        f"If you split at {ratio.requests_per_s:.3g} requests/s: {ratio.prefill} prefill to {ratio.decode} "
        f"decode (needed: {ratio.prefill_needed:.2g} and {ratio.decode_needed:.2g} GPUs), "
        f"{100 * ratio.link_use:.0f} % of a prefill worker's link."
    )


def _table(link: OnLink) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("prompt", "KV", "prefill", "toll", "TTFT split", "longest gap", "pays from"):
        table.add_column(name, justify="right")
    table.add_column("verdict", min_width=len("sometimes"))
    for length in link.lengths:
        table.add_row(*_row(length), Text(length.verdict.answer, style=COLOURS[length.verdict.answer]))
    return table


def _row(length: Length) -> list[str]:
    terms, flips = length.terms, length.verdict.flips_at_bytes_per_s
    return [
        f"{terms.prompt_tokens:,}",
        show_bytes(terms.kv_bytes),
        show_seconds(terms.prefill_s),
        interval(terms.toll_s),
        interval(terms.ttft_split_s),
        f"{show_seconds(terms.gap_s)} → {show_seconds(terms.gap_split_s)}",
        show_rate(flips) if flips else "no link",
    ]


def memory_text(memory: Memory) -> Text:
    """Return the memory limit with its terms, and what a transport without a bound would need."""
    text = (
        f"Memory limit of a worker: {show_bytes(memory.needed)} = (process {show_bytes(memory.process)} + shm "
        f"{show_bytes(memory.shm)} + rings {show_bytes(memory.ring)}) + 15 %, whatever the concurrency. "
        f"A transport that stages requests in host memory needs {show_bytes(memory.needed_unbounded)} for "
        f"{show_bytes(memory.staged)} staged"
    )
    if memory.limit is not None:
        text += f"; your limit of {show_bytes(memory.limit)} "
        text += "is enough for the rings" if memory.fits else "is not even enough for the rings"
        if memory.requests_until_killed is not None:
            text += (
                f", and a transport that frees nothing in time is killed in request {memory.requests_until_killed} of "
                f"{show_bytes(memory.request_kv)}"
            )
    return Text(f"{text}.")


def interval(pair: tuple[float, float]) -> str:
    """Return "2.33 s", "2.33–2.47 s" or "908 ms–1.23 s"."""
    best, worst = map(show_seconds, pair)
    if pair[1] <= pair[0] * 1.005:
        return best
    number, unit = best.split(" ")
    return f"{number}–{worst}" if worst.endswith(f" {unit}") else f"{best}–{worst}"
