"""From GPU memory to GPU memory: how near does the transfer come to what plain TCP can do there?

Two processes on one GPU, loopback TCP, pools of Qwen2.5-7B's shape with the blocks of a request at random places. Our
TcpSender and TcpReceiver on CudaMemory, checksums on, everything published before it is opened; beside it a
plain-socket copy that does nothing but gather, send, receive and scatter (support/gpu_ceiling.py): 8 requests with 1, 2
and 4 streams, and one request with 4. All arms run once per repetition, in rotated order, and ratios are taken within
a repetition, against the best plain-socket arm of that repetition. After each transfer every byte of decode's blocks is
compared, on the GPU.

Environment, for ours: TRANSFER_GPU_IO, TRANSFER_GPU_STREAMS, TRANSFER_GPU_FRAME_KIB, TRANSFER_GPU_RING_MIB (default:
what the memory asks for).
"""

from __future__ import annotations

import os
import statistics
from typing import Literal

import msgspec

from benchmarks.support.gpu_kv import GpuPool
from benchmarks.support.gpu_node import GpuPair, gpu_pair
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.transfer.options import TransferOptions

DESCRIPTION = "GPU memory to GPU memory over loopback TCP reaches 0.9 of what plain sockets can do (needs a GPU)"

MIN_RATIO = 0.9
STREAMS = (1, 2, 4)
CONCURRENT = (1, 8)


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    if not _has_gpu():
        return unavailable("This machine has no CUDA GPU that torch can use.")
    pool, options, repetitions = GpuPool(), _options(), 3 if quick else 7
    with gpu_pair(pool, options) as pair:
        arms = [_Arm(pair, pool, streams, max(CONCURRENT)) for streams in STREAMS]
        arms += [_Arm(pair, pool, max(STREAMS), 1)]
        arms += [_Arm(pair, pool, None, count) for count in CONCURRENT]
        for arm in arms:  # threads, pinned memory, connections and frame sizes find themselves
            arm.measure()
        for repetition in range(repetitions):
            shift = repetition % len(arms)
            rates = {arm.name: arm.measure() for arm in arms[shift:] + arms[:shift]}
            best = max(rates[arm.name] for arm in arms if arm.streams)
            for arm in arms:
                arm.add(rates[arm.name], best)
    return _verdict(arms, pool, repetitions, options)


class _Arm:
    """One way to move `count` requests: over so many plain sockets, or ours (no `streams`)."""

    def __init__(self, pair: GpuPair, pool: GpuPool, streams: int | None, count: int) -> None:
        self.streams, self.count = streams, count
        self.name = f"{f'plain sockets x{streams}' if streams else 'tollbridge'}, {count} at once"
        self._pair, self._pool = pair, pool
        self.rates: list[float] = []
        self.ratios: list[float] = []
        self.cpu_s_per_gb: list[float] = []
        self.all_equal = True

    def measure(self) -> float:
        """Return bytes per second."""
        before = sum(self._pair.busy_s())
        seconds = self._pair.ceiling(self.count, self.streams) if self.streams else self._pair.transfer(self.count)
        num_bytes = self.count * self._pool.request_bytes
        self.cpu_s_per_gb.append((sum(self._pair.busy_s()) - before) / num_bytes * 1e9)
        self.all_equal &= self._pair.is_equal(self.count)
        return num_bytes / seconds

    def add(self, rate: float, best: float) -> None:
        self.rates.append(rate)
        self.ratios.append(rate / best)

    def row(self) -> list[str]:
        rates = sorted(rate / 1e9 for rate in self.rates)
        return [
            self.name,
            f"{statistics.median(rates):.2f} ({rates[0]:.2f}-{rates[-1]:.2f})",
            f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})",
            f"{statistics.median(self.cpu_s_per_gb):.2f}",
            "yes" if self.all_equal else "NO",
        ]


def _verdict(arms: list[_Arm], pool: GpuPool, repetitions: int, options: TransferOptions) -> ClaimResult:
    ours = [arm for arm in arms if not arm.streams]
    ratios = {f"ratio_{arm.count}_concurrent": statistics.median(arm.ratios) for arm in ours}
    goodput = {
        f"{f'plain_x{arm.streams}' if arm.streams else 'ours'}_{arm.count}_bytes_per_s": statistics.median(arm.rates)
        for arm in arms
    }
    all_equal = all(arm.all_equal for arm in arms)
    return ClaimResult(
        holds=all_equal and all(ratio >= MIN_RATIO for ratio in ratios.values()),
        figures={**ratios, **goodput, "bytes_equal": all_equal},
        bounds={**dict.fromkeys(ratios, f">= {MIN_RATIO}"), "bytes_equal": "True"},
        conditions={
            "gpu": _gpu_name(),
            "payload": str(pool),
            "repetitions": repetitions,
            "io": options.io,
            "streams": options.streams or _default_streams(),
            "max_frame_bytes": options.max_frame_bytes or "as the memory asks for",
            "checksums": "on (the plain sockets have none)",
            "ratio": "to the best plain-socket arm of the same repetition",
        },
        table=Table(
            title=f"{pool}: GB/s from GPU memory to GPU memory, median (min-max) of {repetitions}",
            columns=["arm", "GB/s", "of the best plain", "CPU s per GB, both", "bytes equal"],
            rows=[arm.row() for arm in arms],
        ),
    )


def _options() -> TransferOptions:
    environ = os.environ
    streams, ring, frame = (environ.get(f"TRANSFER_GPU_{name}") for name in ("STREAMS", "RING_MIB", "FRAME_KIB"))
    return TransferOptions(
        io=msgspec.convert(environ.get("TRANSFER_GPU_IO", "auto"), Literal["auto", "threads", "process"]),
        streams=int(streams) if streams else None,
        ring_bytes=int(ring) << 20 if ring else None,
        max_frame_bytes=int(frame) << 10 if frame else None,
    )


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


def _gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name(0))


def _default_streams() -> int:
    from tollbridge.transfer.cuda import NUM_STREAMS

    return NUM_STREAMS
