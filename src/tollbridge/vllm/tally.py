"""What a worker counts between two collections of vLLM's statistics; plain data, as it travels between processes."""

from __future__ import annotations

from typing import Any

from tollbridge.transfer.base import TransferEnd

# key -> list of observations, or reason -> count
LISTS = ("wait_s", "wire_s", "total_s", "payload_bytes", "wire_bytes")
COUNTS = ("loaded_tokens", "recomputed_tokens", "sent_bytes", "received_bytes")
REASONS = ("send_outcomes", "receive_outcomes", "failures")
GAUGES = "gauges"  # name -> value now; the newest counts


def empty() -> dict[str, Any]:
    """Return the data of an interval in which nothing happened."""
    data: dict[str, Any] = {key: [] for key in LISTS}
    data.update(dict.fromkeys(COUNTS, 0))
    data.update({key: {} for key in (*REASONS, GAUGES)})
    return data


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the observations of `other`, the later ones, to `into`."""
    into[GAUGES].update(other[GAUGES])
    for key in LISTS:
        into[key].extend(other[key])
    for key in COUNTS:
        into[key] += other[key]
    for key in REASONS:
        for reason, count in other[key].items():
            into[key][reason] = into[key].get(reason, 0) + count


def is_empty(data: dict[str, Any]) -> bool:
    """Return whether no transfer ended and no gauge changed."""
    return not (data["send_outcomes"] or data["receive_outcomes"] or data[GAUGES])


def goodput_bytes_per_s(data: dict[str, Any]) -> float:
    """Return payload bytes per second on the wire over the interval's accepted loads, 0 without any."""
    seconds = sum(data["wire_s"])
    return sum(data["payload_bytes"]) / seconds if seconds > 0 else 0.0


class Tally:
    """Counts the ends of transfers."""

    def __init__(self) -> None:
        self._data = empty()

    def note(self, name: str, value: float) -> None:
        """Report a gauge once."""
        self._data[GAUGES][name] = value

    def sent(self, end: TransferEnd) -> None:
        self._data["sent_bytes"] += end.wire_bytes
        self._outcome("send", end)

    def received(self, end: TransferEnd, *, recomputed_tokens: int) -> None:
        self._data["received_bytes"] += end.wire_bytes
        self._data["recomputed_tokens"] += recomputed_tokens
        self._outcome("receive", end)
        if end.outcome == "done":
            self._data["loaded_tokens"] += end.num_tokens
            for key in LISTS:
                self._data[key].append(getattr(end, key))

    def take(self) -> dict[str, Any] | None:
        """Return what was counted since the last call, None when nothing was."""
        if is_empty(self._data):
            return None
        data, self._data = self._data, empty()
        return data

    def _outcome(self, side: str, end: TransferEnd) -> None:
        outcomes = self._data[f"{side}_outcomes"]
        outcomes[end.outcome] = outcomes.get(end.outcome, 0) + 1
        if end.outcome == "failed":
            key = f"{side}:{end.reason}"
            self._data["failures"][key] = self._data["failures"].get(key, 0) + 1
