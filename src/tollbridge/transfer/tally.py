"""What one side counts about one transfer, for its TransferEnd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tollbridge.transfer.base import TransferEnd
from tollbridge.transfer.frames import HEADER_BYTES
from tollbridge.wire.params import Outcome


@dataclass
class Tally:
    """Counts and times of one transfer. `wire_bytes` = payload + 64 per DATA frame + whole control frames."""

    medium: str = ""
    opened_s: float | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    payload_bytes: int = 0
    control_bytes: int = 0
    num_frames: int = 0

    @property
    def wire_bytes(self) -> int:
        return self.payload_bytes + self.num_frames * HEADER_BYTES + self.control_bytes

    def frame(self, payload_bytes: int) -> None:
        """Count one DATA frame."""
        self.num_frames += 1
        self.payload_bytes += payload_bytes

    def control(self, body_bytes: int) -> None:
        """Count one control frame, sent or received."""
        self.control_bytes += HEADER_BYTES + body_bytes

    def begun(self, now_s: float) -> None:
        """Note that a payload is about to arrive: one that comes whole has taken time all the same."""
        if self.first_byte_s is None:
            self.first_byte_s = now_s

    def moved(self, now_s: float) -> None:
        """Note that payload bytes moved."""
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        self.last_byte_s = now_s

    def report(
        self,
        transfer_id: str,
        side: Literal["send", "receive"],
        verdict: Verdict,
        *,
        num_tokens: int,
        now_s: float,
    ) -> TransferEnd:
        """Return the end of the transfer as this side saw it."""
        opened_s = now_s if self.opened_s is None else self.opened_s
        first_s = now_s if self.first_byte_s is None else self.first_byte_s
        last_s = first_s if self.last_byte_s is None else self.last_byte_s
        return TransferEnd(
            transfer_id=transfer_id,
            side=side,
            outcome=verdict.outcome,
            reason=verdict.reason,
            detail=verdict.detail,
            medium=self.medium,
            num_tokens=num_tokens if verdict.outcome == "done" else 0,
            payload_bytes=self.payload_bytes,
            wire_bytes=self.wire_bytes,
            num_frames=self.num_frames,
            wait_s=max(0.0, first_s - opened_s),
            wire_s=last_s - first_s,
            total_s=now_s - opened_s,
        )


@dataclass(frozen=True)
class Verdict:
    """How a transfer ends."""

    outcome: Outcome
    reason: str = ""
    detail: str = ""
