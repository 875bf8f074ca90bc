"""Two workers with KV memory and a medium between them, for the contract suite."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trustme

from tests.transfer.fake_device import DeviceMemory, FakeDevice
from tests.transfer.tls_files import make_tls
from tollbridge.transfer.base import Fingerprint, KVReceiver, KVSender, LoadRequest, TransferEnd, content_digest
from tollbridge.transfer.channel import TlsFiles
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import OutboardReceiver, OutboardSender
from tollbridge.transfer.shared import SharedBuffer
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

NUM_LAYERS = 3
TOKEN_BYTES = 96
WAIT_S = 60.0  # a test that waits so long has failed

FINGERPRINT = Fingerprint(
    model="m",
    dtype="float16",
    num_layers=NUM_LAYERS,
    num_kv_heads=2,
    head_size=12,
    block_size=16,
    layout="token-major:k,v",
)
DIGEST = content_digest([1, 2, 3])
OTHER_DIGEST = content_digest([1, 2, 4])
SHORT = TransferOptions(heartbeat_s=0.05, progress_timeout_s=0.8, unknown_timeout_s=0.4, open_timeout_s=0.4)
# Nothing ends by itself, however slow the machine: for tests in which something else ends it.
PATIENT = TransferOptions(
    heartbeat_s=0.05,
    progress_timeout_s=WAIT_S,
    unknown_timeout_s=WAIT_S,
    open_timeout_s=WAIT_S,
    handshake_timeout_s=WAIT_S,
)


def new_id() -> str:
    return secrets.token_hex(16)


@cache
def tls_files() -> tuple[TlsFiles, TlsFiles]:
    """Return the files of a prefill and a decode worker, made once."""
    folder, ca = Path(tempfile.mkdtemp(prefix="tollbridge-test-")), trustme.CA()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_tls(folder, "p0", ca), make_tls(folder, "d0", ca)


class Cache:
    """A paged KV cache of random bytes, and what a test wants to know about it; in host memory unless on a `device`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        seed: int,
        token_bytes: int = TOKEN_BYTES,
        granule: int = 1,
        device: FakeDevice | None = None,
    ) -> None:
        size = NUM_LAYERS * num_blocks * block_size * token_bytes
        shared = SharedBuffer(size)
        self.array = np.frombuffer(shared.data, dtype=np.uint8)
        self.array[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self.slots = self.array.reshape(NUM_LAYERS, num_blocks * block_size, token_bytes)
        self.memory: Any
        if device is not None:
            blocks = self.array.reshape(NUM_LAYERS, num_blocks, block_size * token_bytes)
            self.memory = DeviceMemory(blocks, device, block_size=block_size, granule=granule)
            return
        self.memory = BufferMemory(
            self.array,
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=block_size,
            token_bytes=token_bytes,
            granule=granule,
        )
        self.shared, self.memory.shared_fd = shared, shared.fd

    def slot_numbers(self, table: Sequence[int], first_token: int, num_tokens: int) -> np.ndarray:
        size = self.memory.block_size
        tokens = np.arange(first_token, first_token + num_tokens)
        return np.asarray(table, dtype=np.int64)[tokens // size] * size + tokens % size if num_tokens else tokens

    def tokens(self, table: Sequence[int], first_token: int, num_tokens: int) -> np.ndarray:
        """Return a copy of [num_layers, num_tokens, token_bytes]."""
        return self.slots[:, self.slot_numbers(table, first_token, num_tokens)].copy()


class Mailbox:
    """Collects the ends of one side and waits for them without polling in a loop of sleeps."""

    def __init__(self, side: KVSender | KVReceiver) -> None:
        self._side = side
        self._condition = threading.Condition()
        self.ends: dict[str, list[TransferEnd]] = {}
        side.set_listener(self._notify)

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def collect(self) -> None:
        for end in self._side.poll():
            self.ends.setdefault(end.transfer_id, []).append(end)

    def wait(self, transfer_id: str) -> TransferEnd:
        deadline_s = time.monotonic() + WAIT_S
        with self._condition:
            while True:
                self.collect()
                if transfer_id in self.ends:
                    return self.ends[transfer_id][0]
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"transfer {transfer_id} did not end"
                self._condition.wait(min(left_s, 0.05))


@dataclass
class Pair:
    """A prefill and a decode worker. `make` builds them; `close` checks the invariants on the way out."""

    medium: str
    send_cache: Cache
    receive_cache: Cache
    sender: KVSender
    receiver: KVReceiver
    sent: Mailbox = field(init=False)
    received: Mailbox = field(init=False)

    def __post_init__(self) -> None:
        self.sent = Mailbox(self.sender)
        self.received = Mailbox(self.receiver)

    def load(
        self, transfer_id: str, table: Sequence[int], num_tokens: int, *, first_token: int = 0, digest: bytes = DIGEST
    ) -> LoadRequest:
        host, port = self.sender.address
        return LoadRequest(
            transfer_id=transfer_id,
            host=host,
            port=port,
            digest=digest,
            first_token=first_token,
            num_tokens=num_tokens,
            block_table=table,
        )

    def ends(self, transfer_id: str) -> tuple[TransferEnd, TransferEnd]:
        """Wait for both ends: (send, receive)."""
        receive = self.received.wait(transfer_id)
        return self.sent.wait(transfer_id), receive

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what no end tells of."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it did not come to pass"
            self.received.collect()
            time.sleep(0.001)

    def check(self) -> None:
        self.sender.check()
        self.receiver.check()

    def close(self) -> None:
        self.check()
        self.receiver.close()
        self.sender.close()
        self.sent.collect()
        self.received.collect()
        for box in (self.sent, self.received):
            assert all(len(ends) == 1 for ends in box.ends.values()), "a transfer ended more than once"
        for side in (self.sender, self.receiver):
            assert side.statistics().active == 0
            assert side.statistics().pending_bytes == 0
            assert side.statistics().num_connections == 0
        self.check()
        for memory in (self.send_cache.memory, self.receive_cache.memory):
            if isinstance(memory, DeviceMemory):
                memory.device.close()


PairMaker = Callable[..., Pair]


def make_pair(
    medium: str,
    options: TransferOptions | None = None,
    *,
    receive_options: TransferOptions | None = None,
    receive_fingerprint: Fingerprint = FINGERPRINT,
    send_block_size: int = 16,
    receive_block_size: int = 16,
    num_blocks: int = 64,
    token_bytes: int = TOKEN_BYTES,
    granule: int = 1,
    receive_granule: int | None = None,
) -> Pair:
    options = options or PATIENT
    devices = [FakeDevice(), FakeDevice()] if medium.startswith(("device", "remote")) else [None, None]
    sizes = {"token_bytes": token_bytes, "granule": granule}
    send_cache = Cache(num_blocks, send_block_size, seed=1, device=devices[0], **sizes)
    sizes["granule"] = receive_granule or granule
    receive_cache = Cache(num_blocks, receive_block_size, seed=2, device=devices[1], **sizes)
    send_print = msgspec.structs.replace(FINGERPRINT, block_size=send_block_size)
    receive_print = msgspec.structs.replace(receive_fingerprint, block_size=receive_block_size)
    if medium.startswith("remote"):
        send_cache.memory.batch_bytes = 4096  # layers share frames
    sender: KVSender
    receiver: KVReceiver
    receive_options = receive_options or options
    medium, _, streams = medium.partition("-")
    options = replace(options, streams=options.streams or int(streams or 1))
    receive_options = replace(receive_options, streams=receive_options.streams or int(streams or 1))
    if medium == "tls":
        send_files, receive_files = tls_files()
        receive_options = replace(receive_options, tls=receive_files)
        options = replace(options, tls=send_files)
    if medium in ("shm", "nixl"):
        receive_options = replace(receive_options, media=medium)
        options = replace(options, media=medium)
    if medium in ("process", "remote"):
        sender = OutboardSender(send_cache.memory, send_print, options)
        receiver = OutboardReceiver(receive_cache.memory, receive_print, receive_options)
    elif medium != "loopback":
        sender = TcpSender(send_cache.memory, send_print, options)
        receiver = TcpReceiver(receive_cache.memory, receive_print, receive_options)
    else:
        network = LoopbackNetwork(options)
        sender = network.sender(send_cache.memory, send_print)
        receiver = network.receiver(receive_cache.memory, receive_print)
    return Pair(medium, send_cache, receive_cache, sender, receiver)


def need_nixl() -> None:
    """Skip where the package is not installed; UCX speaks TCP, whatever else this machine has."""
    pytest.importorskip("nixl._api", reason="nixl is not installed: pip install nixl==1.5.1")
    os.environ.setdefault("UCX_TLS", "tcp")
