"""The two processes of `transfer-gpu`: each has a pool in GPU memory, our medium on it, and the ceiling's sockets."""

from __future__ import annotations

import multiprocessing as mp
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.support import gpu_ceiling
from benchmarks.support.gpu_kv import BLOCK_TOKENS, RECEIVE_SEED, SEND_SEED, GpuPool
from tollbridge.transfer.base import Fingerprint, KVReceiver, KVSender, LoadRequest, TransferEnd, content_digest
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import make_receiver, make_sender

HOST = "127.0.0.1"
DIGEST = content_digest([7])
MAX_REQUESTS = 8
WAIT_S = 120.0


class GpuPair:
    """Commands the two processes."""

    def __init__(self, prefill: Connection, decode: Connection) -> None:
        self._prefill, self._decode = prefill, decode
        self._address = _answer(prefill)
        _answer(decode)

    def ceiling(self, num_requests: int, streams: int) -> float:
        """Return the seconds that plain sockets take."""
        port = _ask(self._prefill, "listen")
        self._prefill.send(("raw_send", (num_requests, streams)))
        seconds: float = _ask(self._decode, "raw_receive", port, num_requests, streams)
        _answer(self._prefill)
        return seconds

    def transfer(self, num_requests: int) -> float:
        """Return the seconds from the first open to the last end on decode."""
        ids = [secrets.token_hex(16) for _ in range(num_requests)]
        _ask(self._prefill, "publish", ids)
        seconds: float = _ask(self._decode, "load", self._address, ids)
        _ask(self._prefill, "finish", num_requests)
        return seconds

    def is_equal(self, num_requests: int) -> bool:
        """Return whether decode holds prefill's bytes, and forget them."""
        equal: bool = _ask(self._decode, "check", num_requests)
        return equal

    def busy_s(self) -> list[float]:
        """Return the CPU seconds that each process has used."""
        return [_ask(end, "busy") for end in (self._prefill, self._decode)]


@contextmanager
def gpu_pair(pool: GpuPool, options: TransferOptions) -> Iterator[GpuPair]:
    """Run the two processes; needs a GPU with memory for two pools."""
    context = mp.get_context("spawn")
    ends, processes = [], []
    for role in (_Prefill, _Decode):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(role, there, pool, options), daemon=True)
        process.start()
        ends.append(here)
        processes.append(process)
    try:
        yield GpuPair(ends[0], ends[1])
    finally:
        for end in ends:
            end.send(None)
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _ask(end: Connection, command: str, *arguments: Any) -> Any:
    end.send((command, arguments))
    return _answer(end)


def _answer(end: Connection) -> Any:
    if not end.poll(WAIT_S):
        raise TimeoutError("a GPU process did not answer")
    answer = end.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(role: type[_Node], end: Connection, pool: GpuPool, options: TransferOptions) -> None:
    try:
        node = role(pool, options)
        end.send(node.hello())
        while (request := end.recv()) is not None:
            command, arguments = request
            end.send(getattr(node, command)(*arguments))
        node.close()
    except Exception as error:
        end.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


class _Node:
    """What both have."""

    def __init__(self, pool: GpuPool, options: TransferOptions) -> None:
        self.pool, self.options = pool, options

    def memory(self, layers: Sequence[Any]) -> Any:
        from tollbridge.transfer.cuda import CudaMemory

        return CudaMemory(layers, block_size=BLOCK_TOKENS)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            model="gpu-claim",
            dtype="bfloat16",
            num_layers=self.pool.num_layers,
            num_kv_heads=4,
            head_size=128,
            block_size=BLOCK_TOKENS,
            layout="token-major:k,v",
        )

    def tables(self, num_requests: int, seed: int) -> Any:
        import torch

        return torch.tensor(self.pool.tables(num_requests, seed=seed), device="cuda")

    def hello(self) -> Any:
        return None

    def busy(self) -> float:
        """Return the CPU seconds so far, those of an I/O process included."""
        import psutil

        children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return time.process_time() + sum(times.user + times.system for times in children)

    def close(self) -> None: ...


class _Prefill(_Node):
    def __init__(self, pool: GpuPool, options: TransferOptions) -> None:
        super().__init__(pool, options)
        self._layers = pool.prefill()
        self._tables = pool.tables(MAX_REQUESTS, seed=SEND_SEED)
        self._sender = make_sender(self.memory(self._layers), self.fingerprint(), options)
        self._changed = threading.Event()
        self._sender.set_listener(self._changed.set)

    def hello(self) -> tuple[str, int]:
        return self._sender.address

    def publish(self, ids: list[str]) -> None:
        num_tokens = self.pool.request_blocks * BLOCK_TOKENS
        for transfer_id, table in zip(ids, self._tables, strict=False):
            self._sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
            self._sender.publish(transfer_id, table, num_tokens)

    def finish(self, num_requests: int) -> None:
        _wait(self._sender, self._changed, num_requests)

    def listen(self) -> int:
        self._listener = socket.create_server((HOST, 0), backlog=16)
        port: int = self._listener.getsockname()[1]
        return port

    def raw_send(self, num_requests: int, streams: int) -> None:
        sockets = [gpu_ceiling.tune(self._listener.accept()[0]) for _ in range(streams)]
        tables = self.tables(num_requests, SEND_SEED)
        gpu_ceiling.await_question(sockets)
        gpu_ceiling.send(self.pool, self._layers, tables, sockets)
        for sock in (*sockets, self._listener):
            sock.close()

    def close(self) -> None:
        self._sender.close()


class _Decode(_Node):
    def __init__(self, pool: GpuPool, options: TransferOptions) -> None:
        super().__init__(pool, options)
        self._layers = pool.decode()
        self._tables = pool.tables(MAX_REQUESTS, seed=RECEIVE_SEED)
        self._receiver = make_receiver(self.memory(self._layers), self.fingerprint(), options)
        self._changed = threading.Event()
        self._receiver.set_listener(self._changed.set)

    def load(self, address: tuple[str, int], ids: list[str]) -> float:
        begun_s = time.perf_counter()
        for transfer_id, table in zip(ids, self._tables, strict=False):
            self._receiver.open(
                LoadRequest(
                    transfer_id=transfer_id,
                    host=address[0],
                    port=address[1],
                    digest=DIGEST,
                    first_token=0,
                    num_tokens=self.pool.request_blocks * BLOCK_TOKENS,
                    block_table=table,
                )
            )
        _wait(self._receiver, self._changed, len(ids))
        return time.perf_counter() - begun_s

    def raw_receive(self, port: int, num_requests: int, streams: int) -> float:
        tables = self.tables(num_requests, RECEIVE_SEED)
        sockets = [gpu_ceiling.tune(socket.create_connection((HOST, port))) for _ in range(streams)]
        seconds = gpu_ceiling.receive(self.pool, self._layers, tables, sockets)
        for sock in sockets:
            sock.close()
        return seconds

    def check(self, num_requests: int) -> bool:
        sent = self.pool.tables(num_requests, seed=SEND_SEED)
        equal = self.pool.is_equal(self._layers, sent, self._tables[:num_requests])
        for layer in self._layers:
            layer.zero_()
        return equal

    def close(self) -> None:
        self._receiver.close()


def _wait(side: KVSender | KVReceiver, changed: threading.Event, count: int) -> None:
    """Wait until `count` transfers have ended, all done."""
    ends: list[TransferEnd] = []
    while len(ends) < count:
        changed.clear()
        ends += side.poll()
        if len(ends) < count and not changed.wait(WAIT_S):
            raise TimeoutError(f"{count - len(ends)} transfers did not end")
    bad = [end for end in ends if end.outcome != "done"]
    if bad:
        raise RuntimeError(f"a transfer {bad[0].outcome}: {bad[0].reason} {bad[0].detail}")
