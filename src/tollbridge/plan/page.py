"""A plan as one HTML file with two plots: readable in ten seconds, nothing loaded from elsewhere."""

from __future__ import annotations

import io
import re
from importlib.resources import files

from tollbridge.config.quantity import show_bytes, show_rate, show_seconds
from tollbridge.errors import ConfigError
from tollbridge.plan.plan import Length, OnLink, Plan
from tollbridge.plan.text import interval, memory_text

_PAGE = files("tollbridge.plan").joinpath("page.html")
_TONES = {"do not split": "no", "split some requests": "some", "split": "yes"}


def page(plan: Plan) -> str:
    """Return the HTML. Raises ConfigError when jinja2 or matplotlib (the extra `bench`) is not installed."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--html needs {error.name}: install tollbridge[bench].") from None
    matplotlib.use("svg")
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(_PAGE.read_text()).render(
        kv=plan.kv,
        fixed=show_bytes(plan.kv.fixed_bytes),
        links=[_section(link) for link in plan.links],
        memory=memory_text(plan.memory).plain if plan.memory else "",
        assumed=plan.assumed,
    )


def _section(link: OnLink) -> dict[str, object]:
    from markupsafe import Markup

    low, high = link.break_even_bytes_per_s
    ratio = link.ratio
    return {
        "answer": link.verdict.answer.capitalize(),
        "tone": _TONES[link.verdict.answer],
        "name": link.link.name,
        "why": link.verdict.why,
        "rows": [_row(length) for length in link.lengths],
        "figure": Markup(figure(link)),  # noqa: S704 - our own SVG
        "break_even": f"{show_rate(low)} to {show_rate(high)}",
        "ratio": ratio
        and (
            f"If split at {ratio.requests_per_s:.3g} requests/s: {ratio.prefill} prefill to {ratio.decode} decode; "
            f"a prefill worker's link {100 * ratio.link_use:.0f} % used."
        ),
    }


def _row(length: Length) -> dict[str, object]:
    terms, verdict = length.terms, length.verdict
    flips = verdict.flips_at_bytes_per_s
    return {
        "cells": [
            f"{terms.prompt_tokens:,}",
            show_bytes(terms.kv_bytes),
            show_seconds(terms.prefill_s),
            interval(terms.wire_s),
            interval(terms.toll_s),
            show_seconds(terms.ttft_local_s),
            interval(terms.ttft_split_s),
            f"{show_seconds(terms.gap_s)} → {show_seconds(terms.gap_split_s)}",
            show_rate(flips) if flips else "no link",
        ],
        "answer": verdict.answer.capitalize(),
        "tone": verdict.answer.split()[0],
        "why": verdict.why,
    }


def figure(link: OnLink) -> str:
    """Return an SVG: TTFT by length (unsplit, split, split by a transport that waits for prefill), and toll by link."""
    from matplotlib.figure import Figure

    lengths = [length.terms for length in link.lengths]
    drawing = Figure(figsize=(11, 4))
    left, right = drawing.subplots(1, 2)
    tokens = [terms.prompt_tokens for terms in lengths]
    left.plot(tokens, [terms.ttft_local_s for terms in lengths], "o-", color="#1a7f37", label="not split")
    left.plot(tokens, [terms.ttft_split_s[1] for terms in lengths], "s-", color="#0969da", label="split, overlapped")
    sequential = [terms.prefill_s + terms.toll_sequential_s[1] for terms in lengths]
    left.plot(tokens, sequential, "^--", color="#b3261e", label="split, transfer after prefill")
    left.set(xlabel="prompt tokens", ylabel="time to first token, s", xlim=(0, None), ylim=(0, None))
    left.legend(frameon=False)
    for terms in lengths:
        rates = [link.link.low * 2 ** (step / 4) for step in range(-12, 25)]
        wire_s = [max(terms.kv_bytes / rate - terms.prefill_s, 0.0) for rate in rates]
        right.plot([rate / 1e6 for rate in rates], wire_s, label=f"{terms.prompt_tokens:,} tokens")
    right.axvspan(link.link.low / 1e6, max(link.link.high, link.link.low * 1.01) / 1e6, color="#0969da", alpha=0.25)
    right.set(
        xscale="log",
        xlabel="link, MB/s (yours is shaded)",
        ylabel="wire time that prefill cannot hide, s",
        ylim=(0, None),
    )
    right.legend(frameon=False)
    drawing.tight_layout()
    out = io.StringIO()
    drawing.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
