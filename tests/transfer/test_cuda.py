"""KV from GPU memory to GPU memory, on a machine that has a GPU; what needs none is in test_staging.py."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tollbridge.errors import UnsupportedError
from tollbridge.transfer.base import Fingerprint, LoadRequest, TransferEnd
from tollbridge.transfer.cuda import CudaMemory, _Pinned
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import make_receiver, make_sender

torch: Any = pytest.importorskip("torch")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

LAYERS, BLOCKS, BLOCK, BLOCK_BYTES = 3, 64, 16, 16 * 96
FINGERPRINT = Fingerprint(
    model="m", dtype="float16", num_layers=LAYERS, num_kv_heads=2, head_size=12, block_size=BLOCK, layout="token-major"
)
SEND_TABLE = [5, 6, 7, 1, 0, 9, 8, 20, 40, 41]
RECEIVE_TABLE = [50, 3, 2, 4, 5, 6, 60, 61, 30, 11]


def test_layers_must_fit() -> None:
    layer = torch.zeros((4, 64), dtype=torch.uint8)
    for layers, block_size, granule, word in (
        ([], 16, 1, "a layer"),
        ([layer.float()], 16, 1, "uint8"),
        ([layer[:, ::2]], 16, 1, "contiguous"),
        ([layer, layer[:2]], 16, 1, "one shape"),
        ([layer], 16, 3, "must divide"),
        ([layer], 24, 1, "does not divide"),
    ):
        with pytest.raises(ValueError, match=word):
            CudaMemory(layers, block_size=block_size, granule=granule)
    with pytest.raises(UnsupportedError, match="for CUDA GPUs"):
        CudaMemory([layer], block_size=16)


def test_memory_that_the_driver_does_not_pin_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(OSError, match=r"4096 bytes could not be pinned \(CUDA error 2"):
        _Pinned(torch.zeros(4096, dtype=torch.uint8), torch.device("cpu"))


class Rig:
    """Two pools on the GPU and the medium between them."""

    def __init__(self, granule: int, options: TransferOptions, block_bytes: int = BLOCK_BYTES) -> None:
        with torch.inference_mode():  # as engines allocate their caches
            self.sent = torch.randint(0, 256, (LAYERS, BLOCKS, block_bytes), dtype=torch.uint8, device="cuda")
            self.received = torch.zeros_like(self.sent)
        memories = [CudaMemory(list(pool), block_size=BLOCK, granule=granule) for pool in (self.sent, self.received)]
        self.sender = make_sender(memories[0], FINGERPRINT, options)
        self.receiver = make_receiver(memories[1], FINGERPRINT, options)
        self._told = threading.Event()
        for side in (self.sender, self.receiver):
            side.set_listener(self._told.set)

    def begin(self, num_tokens: int, first_token: int = 0) -> str:
        transfer_id = secrets.token_hex(16)
        self.sender.register(transfer_id, digest=b"d", num_tokens=num_tokens)
        host, port = self.sender.address
        self.receiver.open(
            LoadRequest(
                transfer_id=transfer_id,
                host=host,
                port=port,
                digest=b"d",
                first_token=first_token,
                num_tokens=num_tokens - first_token,
                block_table=RECEIVE_TABLE,
            )
        )
        return transfer_id

    def ends(self) -> list[TransferEnd]:
        """Wait for both ends of one transfer."""
        ends: list[TransferEnd] = []
        while len(ends) < 2:
            self._told.clear()
            ends += [*self.sender.poll(), *self.receiver.poll()]
            assert len(ends) >= 2 or self._told.wait(20)
        return ends

    def tokens(self, pool: Any, table: list[int], first_token: int, end_token: int) -> Any:
        """Return `[num_layers, num_tokens, token_bytes]`."""
        by_token = pool[:, torch.tensor(table, device="cuda")].reshape(LAYERS, -1, pool.shape[2] // BLOCK)
        return by_token[:, first_token:end_token]

    def close(self) -> None:
        for side in (self.sender, self.receiver):
            side.check()
            side.close()


@pytest.fixture(params=["threads", "process"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(granule: int = 1, *, block_bytes: int = BLOCK_BYTES, **options: Any) -> Rig:
        rigs.append(Rig(granule, TransferOptions(io=request.param, **options), block_bytes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@needs_gpu
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 16 * 3])  # words of 8 bytes, and bytes
@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 160), (0, 1), (7, 100), (48, 159)])
def test_tokens(make_rig: Callable[..., Rig], first_token: int, num_tokens: int, block_bytes: int) -> None:
    rig = make_rig(block_bytes=block_bytes)
    transfer_id = rig.begin(num_tokens, first_token)
    rig.sender.publish(transfer_id, SEND_TABLE, num_tokens)
    assert [end.outcome for end in rig.ends()] == ["done", "done"]
    got, sent = (
        rig.tokens(pool, table, first_token, num_tokens)
        for pool, table in ((rig.received, RECEIVE_TABLE), (rig.sent, SEND_TABLE))
    )
    assert torch.equal(got, sent)
    assert rig.received.count_nonzero() <= got.numel()


@needs_gpu
def test_whole_blocks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(BLOCK)
    transfer_id = rig.begin(100, 16)
    rig.sender.publish(transfer_id, SEND_TABLE, 50, layer=1)
    rig.sender.publish(transfer_id, SEND_TABLE, 100)
    assert [end.outcome for end in rig.ends()] == ["done", "done"]
    assert torch.equal(rig.received[:, RECEIVE_TABLE[1:7]], rig.sent[:, SEND_TABLE[1:7]])


@needs_gpu
def test_kv_leaves_when_it_is_computed(make_rig: Callable[..., Rig]) -> None:
    """Publish behind a forward pass that takes a while; what arrives is what that computed."""
    rig = make_rig()
    transfer_id = rig.begin(160)
    for layer in range(LAYERS):
        torch.cuda._sleep(50_000_000)
        with torch.inference_mode():
            rig.sent[layer].fill_(layer + 1)
        rig.sender.publish(transfer_id, SEND_TABLE, 160, layer=layer)
    assert not torch.cuda.current_stream().query()  # none of it waited
    assert [end.outcome for end in rig.ends()] == ["done", "done"]
    assert [set(rig.received[layer, RECEIVE_TABLE].unique().tolist()) for layer in range(LAYERS)] == [{1}, {2}, {3}]


@needs_gpu
def test_blocks_are_written_when_their_former_owner_is_through(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    torch.cuda._sleep(100_000_000)
    copy = rig.received.clone()  # kernels of the former owner, issued and not yet run
    transfer_id = rig.begin(160)
    rig.sender.publish(transfer_id, SEND_TABLE, 160)
    assert [end.outcome for end in rig.ends()] == ["done", "done"]
    assert not copy.any()
    assert torch.equal(rig.received[:, RECEIVE_TABLE], rig.sent[:, SEND_TABLE])


@needs_gpu
def test_many_frames_through_a_small_ring(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(min_frame_bytes=4096, max_frame_bytes=4096, ring_bytes=16 * 4096)
    for _ in range(3):
        with torch.inference_mode():
            rig.received.zero_()
        transfer_id = rig.begin(160)
        rig.sender.publish(transfer_id, SEND_TABLE, 160)
        assert [end.outcome for end in rig.ends()] == ["done", "done"]
        assert torch.equal(rig.received[:, RECEIVE_TABLE], rig.sent[:, SEND_TABLE])


@needs_gpu
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_cancel(make_rig: Callable[..., Rig], side: str) -> None:
    rig = make_rig()
    transfer_id = rig.begin(160)
    rig.sender.publish(transfer_id, SEND_TABLE, 100)
    (rig.sender if side == "sender" else rig.receiver).cancel(transfer_id, "the client left")
    assert {end.outcome for end in rig.ends()} <= {"cancelled", "failed"}
