"""Which fault may hit a transfer in which state of the protocol, and how often each has.

A scene is a fault and the states of the two sides when it strikes. Prefill: unknown (decode asked, or is about to;
prefill has not heard of the request), queued, computing, sending (all is computed, not all confirmed). Decode:
connecting (handshake), asked (no byte yet), receiving; None when it has not opened.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

PREFILL = ("unknown", "queued", "computing", "sending")
DECODE = ("connecting", "asked", "receiving")
COLUMNS = (*PREFILL, *DECODE)

PAIRS: tuple[tuple[str, str | None], ...] = (
    *(("unknown", decode) for decode in ("connecting", "asked")),
    *(("queued", decode) for decode in (None, "connecting", "asked")),
    *((prefill, decode) for prefill in ("computing", "sending") for decode in (None, *DECODE)),
)

# Faults of one frame, of the link, of a process, of an engine. `cut` closes between frames, `cut in frame` within one;
# `truncated` loses the end of a frame while the stream goes on.
FRAME_FAULTS = ("payload flip", "header flip", "duplicated", "reordered", "truncated", "cut in frame")
LINK_FAULTS = ("cut", "stalled", "slow reader")
PROCESS_FAULTS = ("prefill killed", "decode killed")
ENGINE_FAULTS = ("cancel on prefill", "cancel on decode", "rewind", "wrong digest")
FAULTS = (*PROCESS_FAULTS, *LINK_FAULTS, *FRAME_FAULTS, *ENGINE_FAULTS)

HARMLESS = frozenset({"duplicated", "reordered", "slow reader", "rewind"})  # what they hit must be done all the same


class Scene(NamedTuple):
    fault: str
    prefill: str
    decode: str | None


def _can(scene: Scene) -> bool:
    fault, prefill, decode = scene
    if fault == "prefill killed" or (fault == "cancel on prefill" and prefill != "unknown"):
        return True
    if fault == "rewind":  # only what has computed something is preempted
        return prefill in ("computing", "sending")
    if fault == "wrong digest":  # found as soon as both sides are known
        return decode == "asked"
    if fault == "reordered" and decode == "connecting":  # the handshake never has two frames under way
        return False
    return decode is not None and fault != "cancel on prefill"


SCENES = tuple(scene for fault in FAULTS for pair in PAIRS if _can(scene := Scene(fault, *pair)))
CELLS = frozenset((scene.fault, state) for scene in SCENES for state in scene[1:] if state is not None)


class Counts:
    """How many transfers each fault has hit in each state."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self._cells: Counter[tuple[str, str]] = Counter()

    def hit(self, fault: str, *states: str | None) -> None:
        for state in states:
            if (fault, state) in CELLS:
                assert state is not None
                self._cells[fault, state] += 1

    def get(self, fault: str, state: str) -> int | None:
        """Return the count of a cell, None where the fault cannot occur."""
        return self._cells[fault, state] if (fault, state) in CELLS else None

    @property
    def least(self) -> int:
        return min(self._cells[cell] for cell in CELLS)

    @property
    def total(self) -> int:
        return sum(self._cells.values())

    def lacking(self) -> list[tuple[str, str]]:
        return sorted(cell for cell in CELLS if self._cells[cell] < self.wanted)

    def choose(self, rng: random.Random) -> Scene:
        """Return a scene, rare ones more often; any scene once nothing is lacking."""
        weights = [sum(self._lack(scene.fault, state) for state in scene[1:]) for scene in SCENES]
        if not any(weights):
            return rng.choice(SCENES)
        return rng.choices(SCENES, weights)[0]

    def rows(self) -> list[list[str]]:
        """Return a table of counts, a row for each fault, "-" where it cannot occur."""
        return [
            [fault, *("-" if (count := self.get(fault, state)) is None else str(count) for state in COLUMNS)]
            for fault in FAULTS
        ]

    def _lack(self, fault: str, state: str | None) -> int:
        if state is None:
            return 0
        return max(0, self.wanted - self._cells[fault, state])
