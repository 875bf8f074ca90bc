"""A snapshot as one screen of text. Pure. A split is an amber diamond, a local request a blue circle, as at /ui."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollbridge.ui.snapshot import Alert, LinkRow, RequestRow, Snapshot, WorkerRow

MAX_ROWS = 12
_MARKS = {"split": ("◆ split", "yellow"), "local": ("● local", "blue")}
_STYLES = {"bad": "bold red", "warn": "yellow", "note": "dim"}
_WORDS = {"bad": "problem", "warn": "attention", "note": "note"}
_PHASES = {"prefill": "before its first token", "transfer": "KV crossing", "decode": "decoding"}


def screen(now: Snapshot) -> RenderableType:
    """Return everything, the verdict first."""
    return Group(
        _head(now),
        _verdict(now),
        *map(_alert, now.alerts),
        Text(),
        _workers(now.workers),
        *map(_link, now.links),
        Text(),
        _requests([*reversed(now.active), *now.recent][:MAX_ROWS]),
    )


def verdict(now: Snapshot) -> str:
    """Return whether splitting pays, in one sentence."""
    totals = now.totals
    if not totals.split:
        return f"Nothing has been split so far, of {totals.requests} requests."
    paid = f"{duration(totals.avoided_s)} of stalls spared for {duration(totals.toll_s)} of toll"
    share = f"{totals.split} of {totals.requests} requests were split"
    if totals.avoided_s > 1.1 * totals.toll_s:
        return f"Splitting is paying off: {paid}; {share}."
    if totals.toll_s > 1.1 * totals.avoided_s:
        return f"Splitting is not paying off: {paid}; {share}."
    return f"Splitting costs about what it spares: {paid}; {share}."


def duration(seconds: float | None) -> str:
    """Return seconds for a person, with three digits."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def size(num_bytes: float) -> str:
    """Return bytes for a person, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _head(now: Snapshot) -> Text:
    window, late = now.window, "bold red"
    text = Text.assemble(("Tollbridge ", "bold"), f"{now.model.rpartition('/')[2]}, policy {now.policy}: ")
    text.append(f"{now.in_flight} in flight, {now.waiting} waiting, ")
    rate = window.num_ended / window.seconds
    text.append(f"{rate:.1f} requests/s end, {rate * (window.slo_share or 0):.1f} within SLO; ")
    ttft_late = (window.ttft_p95_s or 0) > now.slo_ttft_s
    text.append(
        f"first token p95 {duration(window.ttft_p95_s)} of {duration(now.slo_ttft_s)}", late if ttft_late else ""
    )
    tpot_late = (window.tpot_p95_s or 0) > now.slo_tpot_s
    text.append(f", gap {duration(window.tpot_p95_s)} of {duration(now.slo_tpot_s)}", late if tpot_late else "")
    totals = now.totals
    if totals.cacheable_tokens:
        text.append(f"; prefix hits {totals.cached_tokens / totals.cacheable_tokens:.0%}")
    return text


def _verdict(now: Snapshot) -> Text:
    totals = now.totals
    pays = totals.avoided_s > totals.toll_s
    return Text(verdict(now), "bold green" if totals.split and pays else "bold yellow" if totals.split else "bold")


def _alert(alert: Alert) -> Text:
    return Text(f"{_WORDS[alert.level]}: {alert.text}", _STYLES[alert.level])


def _workers(workers: Iterable[WorkerRow]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in (
        ("worker", "left"), ("prefers", "left"), ("state", "left"), ("serving", "right"), ("prefill legs", "right"),
        ("tokens waiting", "right"), ("KV used", "right"), ("held for decode", "right"), ("sent", "right"),
        ("received", "right"),
    ):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left")
    for each in workers:
        state = (
            ("suspect", "yellow") if each.suspect else ("ready", "green") if each.ready else ("not ready", "bold red")
        )
        used = f"{each.kv_used_tokens / each.kv_total_tokens:.0%}" if each.kv_total_tokens else "-"
        pinned = f"{each.pinned_tokens / each.max_pinned_tokens:.0%}" if each.max_pinned_tokens else "-"
        table.add_row(
            each.name, each.prefer, Text(*state), str(each.num_decodes), str(each.num_prefills),
            str(each.waiting_prefill_tokens), used, pinned, _ends(each.send.done, each.send.failed),
            _ends(each.receive.done, each.receive.failed),
        )  # fmt: skip
    return table


def _ends(done: int, failed: int) -> str:
    return f"{done}, {failed} failed" if failed else str(done)


def _link(link: LinkRow) -> Text:
    goodput = f"{size(link.goodput_bytes_per_s)}/s" if link.goodput_bytes_per_s else "not measured"
    use = f", {link.use:.0%} used" if link.use is not None else ""
    return Text(f"{link.prefill} ═══ {link.decode}  {goodput}{use}, {link.num_transfers} crossing", "cyan")


def _requests(rows: Iterable[RequestRow]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), expand=True)
    for name in ("decision", "on", "tokens", "first token", "all", ""):
        table.add_column(name, no_wrap=True, ratio=1 if not name else None, overflow="ellipsis")
    for each in rows:
        words, style = _MARKS[each.choice]
        failed = each.status in ("error", "cancelled") or each.verified is False
        table.add_row(
            Text(words, style), f"{each.prefill} → {each.decode}" if each.prefill else each.decode,
            str(each.prompt_tokens or "-"), duration(each.ttft_s),
            _PHASES[each.phase] if each.status == "running" else duration(each.total_s),
            Text(each.error or each.why, "red" if failed else "dim"),
        )  # fmt: skip
    return table
