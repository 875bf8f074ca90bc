"""Two engines without a model: KV that is known beforehand, blocks with an owner each, and no wrong byte unseen."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.transfer.harness import DIGEST, NUM_LAYERS, OTHER_DIGEST, Cache
from tollbridge.transfer.base import KVReceiver, KVSender, LoadRequest, TransferEnd

TOKEN_BYTES = 32
NUM_BLOCKS = 96
SEND_BLOCK, RECEIVE_BLOCK = 4, 8  # tokens; the two sides may differ
MAX_TOKENS = 24


@dataclass(eq=False)
class Transfer:
    """One request on both sides."""

    transfer_id: str
    host: str
    num_tokens: int  # of the prompt
    first_token: int  # decode lacks [first_token, end_token)
    end_token: int
    truth: np.ndarray  # [NUM_LAYERS, num_tokens, TOKEN_BYTES]: what prefill computes
    wrong_digest: bool = False
    # prefill
    registered: bool = False
    published: list[int] = field(default_factory=lambda: [0] * NUM_LAYERS)
    send_table: list[int] = field(default_factory=list)
    send_end: TransferEnd | None = None
    # decode
    opened: bool = False
    asked: bool = False  # the OPEN has left
    receiving: bool = False  # a payload byte has come
    receive_table: list[int] = field(default_factory=list)
    receive_end: TransferEnd | None = None
    # what happened to it
    hurt: bool = False  # a fault hit it that may fail it
    prefill_died: bool = False
    decode_died: bool = False

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.transfer_id)

    @property
    def send_over(self) -> bool:
        return not self.registered or self.send_end is not None or self.prefill_died

    @property
    def receive_over(self) -> bool:
        return not self.opened or self.receive_end is not None or self.decode_died

    @property
    def prefill_state(self) -> str | None:
        if not self.registered:
            return "unknown" if self.opened else None
        if self.send_over:
            return None
        if min(self.published) >= self.num_tokens:
            return "sending"
        return "computing" if any(self.published) else "queued"

    @property
    def decode_state(self) -> str | None:
        if not self.opened or self.receive_over:
            return None
        if not self.asked:
            return "connecting"
        return "receiving" if self.receiving else "asked"


class Blocks:
    """The ownership ledger: each block is free or has one owner."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free = list(range(NUM_BLOCKS))
        self._owned: dict[str, list[int]] = {}

    def take(self, owner: str, count: int) -> list[int]:
        assert owner not in self._owned, f"{owner} owns blocks already"
        self._rng.shuffle(self._free)
        blocks = [self._free.pop() for _ in range(count)]
        self._owned[owner] = blocks
        return list(blocks)

    def give(self, owner: str) -> None:
        self._free += self._owned.pop(owner)

    def check_empty(self) -> None:
        assert not self._owned, f"blocks leaked: {self._owned}"
        assert sorted(self._free) == list(range(NUM_BLOCKS)), "blocks were lost or came twice"


class _Engine:
    """What the two have in common."""

    block_size: int

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cache = Cache(NUM_BLOCKS, self.block_size, seed=rng.getrandbits(32), token_bytes=TOKEN_BYTES)
        self.blocks = Blocks(rng)
        self.live: dict[str, Transfer] = {}
        self.outcomes: Counter[str] = Counter()

    def _take(self, transfer: Transfer, num_tokens: int) -> list[int]:
        return self.blocks.take(transfer.transfer_id, -(-num_tokens // self.block_size))

    def _count(self, end: TransferEnd) -> Transfer:
        transfer = self.live.pop(end.transfer_id, None)
        assert transfer is not None, f"{end.transfer_id} ended twice, or was never begun: {end}"
        self.outcomes[f"{end.outcome} {end.reason}".strip()] += 1
        return transfer

    def _scribble(self, table: list[int]) -> None:
        """Use the blocks for something else."""
        for block in table:
            slots = slice(block * self.block_size, (block + 1) * self.block_size)
            self.cache.slots[:, slots] = self.rng.randrange(256)


class PrefillEngine(_Engine):
    """Computes what `truth` says, at once, into blocks that are its own until the end."""

    block_size = SEND_BLOCK

    def __init__(self, rng: random.Random, sender: KVSender) -> None:
        super().__init__(rng)
        self.sender = sender

    def register(self, transfer: Transfer) -> None:
        transfer.registered = True
        transfer.send_table = self._take(transfer, transfer.num_tokens)
        self.live[transfer.transfer_id] = transfer
        self.sender.register(transfer.transfer_id, digest=DIGEST, num_tokens=transfer.num_tokens)

    def compute(self, transfer: Transfer, num_tokens: int, layer: int | None = None) -> None:
        """Write and publish [0, num_tokens) of one layer, or of all."""
        if transfer.send_over:
            return
        for index in range(NUM_LAYERS) if layer is None else (layer,):
            first = transfer.published[index]
            if first < num_tokens:
                slots = self.cache.slot_numbers(transfer.send_table, first, num_tokens - first)
                self.cache.slots[index, slots] = transfer.truth[index, first:num_tokens]
                transfer.published[index] = num_tokens
        self.sender.publish(transfer.transfer_id, transfer.send_table, num_tokens, layer=layer)

    def preempt(self, transfer: Transfer) -> None:
        """Take the blocks away; it starts again in others."""
        self.sender.rewind(transfer.transfer_id)
        if transfer.send_over:
            return
        self._scribble(transfer.send_table)
        self.blocks.give(transfer.transfer_id)
        transfer.published = [0] * NUM_LAYERS
        transfer.send_table = self._take(transfer, transfer.num_tokens)

    def cancel(self, transfer: Transfer) -> None:
        self.sender.cancel(transfer.transfer_id, "prefill gave up")

    def poll(self) -> None:
        for end in self.sender.poll():
            transfer = self._count(end)
            transfer.send_end = end
            self._scribble(transfer.send_table)
            self.blocks.give(transfer.transfer_id)

    def died(self) -> None:
        for transfer in self.live.values():
            transfer.prefill_died = True


class DecodeEngine(_Engine):
    """Loads into blocks that are the receiver's until the end, and looks at every byte of its memory afterwards."""

    block_size = RECEIVE_BLOCK

    def __init__(self, rng: random.Random, receiver: KVReceiver) -> None:
        super().__init__(rng)
        self.receiver = receiver
        self._expected = self.cache.slots.copy()
        self._lent = np.zeros(self.cache.slots.shape[1], dtype=bool)  # slots that the receiver may write now

    def open(self, transfer: Transfer, address: tuple[str, int]) -> None:
        transfer.opened = True
        transfer.receive_table = self._take(transfer, transfer.end_token)
        self.live[transfer.transfer_id] = transfer
        self._lent[self._slots(transfer)] = True
        self.receiver.open(
            LoadRequest(
                transfer_id=transfer.transfer_id,
                host=address[0],
                port=address[1],
                digest=OTHER_DIGEST if transfer.wrong_digest else DIGEST,
                first_token=transfer.first_token,
                num_tokens=transfer.end_token - transfer.first_token,
                block_table=transfer.receive_table,
            )
        )

    def cancel(self, transfer: Transfer) -> None:
        self.receiver.cancel(transfer.transfer_id, "the client left")

    def poll(self) -> None:
        for end in self.receiver.poll():
            transfer = self._count(end)
            transfer.receive_end = end
            self._ended(transfer, end)

    def check_memory(self) -> None:
        """Raise AssertionError when a byte changed that no open load covers."""
        wrong = (self.cache.slots != self._expected).any(axis=(0, 2)) & ~self._lent
        assert not wrong.any(), f"slots {np.flatnonzero(wrong)} were written, and belong to no open load"

    def died(self) -> None:
        for transfer in self.live.values():
            transfer.decode_died = True

    def _slots(self, transfer: Transfer) -> np.ndarray:
        return self.cache.slot_numbers(
            transfer.receive_table, transfer.first_token, transfer.end_token - transfer.first_token
        )

    def _ended(self, transfer: Transfer, end: TransferEnd) -> None:
        slots = self._slots(transfer)
        if end.outcome == "done":
            truth = transfer.truth[:, transfer.first_token : transfer.end_token]
            assert np.array_equal(self.cache.slots[:, slots], truth), f"wrong KV was accepted: {end}"
            assert not transfer.wrong_digest, "KV of other tokens was accepted"
        self.check_memory()
        self._lent[slots] = False
        self._scribble(transfer.receive_table)
        self._expected[:] = self.cache.slots  # what other open loads have got so far is theirs to overwrite
        self.blocks.give(transfer.transfer_id)
