"""Two engines and a wire: a split request must get what a local one gets, whatever happens on the way.

Over the loopback medium, where what can be sent has arrived when `publish` returns, and over TCP, where it has not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from tests.engine.fakes import TIMEOUT_S, Answer, Gate, Worker, fingerprint, make_memory, prompt_of, reference
from tollbridge.transfer.base import Fingerprint, KVMemory
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp_receive import TcpReceiver
from tollbridge.transfer.tcp_send import TcpSender
from tollbridge.wire.params import Role, TransferParams

LATE_S = 2 * TIMEOUT_S
LATE = TransferOptions(
    progress_timeout_s=LATE_S, unknown_timeout_s=LATE_S, open_timeout_s=LATE_S
)  # no test waits so long


class TcpNetwork:
    """LoopbackNetwork's two methods over sockets."""

    def sender(self, memory: KVMemory, fingerprint: Fingerprint) -> TcpSender:
        return TcpSender(memory, fingerprint, LATE)

    def receiver(self, memory: KVMemory, fingerprint: Fingerprint) -> TcpReceiver:
        return TcpReceiver(memory, fingerprint, LATE)


Network = LoopbackNetwork | TcpNetwork


@pytest.fixture(params=[LoopbackNetwork, TcpNetwork], ids=["loopback", "tcp"])
def network(request: pytest.FixtureRequest) -> Network:
    network: Network = request.param(LATE) if request.param is LoopbackNetwork else request.param()
    return network


class Split:
    """A prefill and a decode worker; either can also serve locally."""

    def __init__(
        self,
        network: Network,
        *,
        prefill_blocks: int = 64,
        decode_blocks: int = 64,
        decode_fingerprint: Fingerprint | None = None,
    ) -> None:
        prefill_memory, decode_memory = make_memory(prefill_blocks), make_memory(decode_blocks)
        self.sender = network.sender(prefill_memory, fingerprint())
        self.prefill = Worker(memory=prefill_memory, sender=self.sender, max_num_batched_tokens=8)
        self.decode = Worker(
            memory=decode_memory, receiver=network.receiver(decode_memory, decode_fingerprint or fingerprint())
        )
        self._next_id = 0
        self.veto_tokens = 0

    def params(self, role: Role, transfer_id: str) -> TransferParams:
        host, port = self.sender.address
        return TransferParams(
            v=1, transfer_id=transfer_id, role=role, host=host, port=port, expires=2e9, veto_tokens=self.veto_tokens
        )

    def transfer_id(self) -> str:
        self._next_id += 1
        return f"{self._next_id:032x}"

    def submit(
        self, prompt: Sequence[int], *, max_tokens: int = 6, decode_first: bool = False, seed: int = 0
    ) -> tuple[Answer, Answer]:
        """Send both legs; return (prefill's answer, decode's answer)."""
        name = self.transfer_id()
        legs = {
            "prefill": lambda: self.prefill.submit(
                prompt, max_tokens=1, seed=seed, transfer=self.params("prefill", name)
            ),
            "decode": lambda: self.decode.submit(
                prompt, max_tokens=max_tokens, seed=seed, transfer=self.params("decode", name)
            ),
        }
        answers = {role: legs[role]() for role in sorted(legs, reverse=not decode_first)}
        return answers["prefill"], answers["decode"]

    def check(self) -> None:
        self.prefill.engine.check()
        self.decode.engine.check()

    def close(self) -> None:
        self.check()
        self.decode.engine.shutdown()
        self.prefill.engine.shutdown()
        self.decode.assert_empty()
        self.prefill.assert_empty()


@pytest.fixture
def split(network: Network) -> Iterator[Split]:
    split = Split(network)
    yield split
    split.close()


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 33, 60])
def test_split_equals_local(split: Split, length: int, decode_first: bool) -> None:
    prompt = prompt_of(length)
    first, answer = split.submit(prompt, decode_first=decode_first)
    report, prefill_report = answer.wait().report, first.wait().report
    assert answer.token_ids == reference(prompt, max_tokens=6)
    assert first.token_ids == reference(prompt, max_tokens=1)
    assert report is not None and prefill_report is not None
    assert (report.loaded_tokens, report.computed_tokens) == (length - 1, 1)
    assert prefill_report.computed_tokens == length
    if length > 1:
        assert report.transfer is not None and report.transfer.outcome == "done"


def test_prefix_hits_on_both_sides(split: Split) -> None:
    prompt = prompt_of(30)
    split.prefill.submit(prompt[:22]).wait()
    split.decode.submit(prompt[:9]).wait()
    first, answer = split.submit(prompt)
    report, prefill_report = answer.wait().report, first.wait().report
    assert report is not None and (report.cached_tokens, report.loaded_tokens, report.computed_tokens) == (8, 21, 1)
    assert prefill_report is not None and prefill_report.cached_tokens == 20
    assert answer.token_ids == reference(prompt, max_tokens=6)


@pytest.mark.parametrize(("veto_tokens", "loaded"), [(21, 0), (20, 21)])
def test_decode_computes_the_little_that_it_lacks(split: Split, veto_tokens: int, loaded: int) -> None:
    """It knows its own prefix cache better than the router did, and both sides let go of their blocks."""
    prompt = prompt_of(30)
    split.decode.submit(prompt[:9]).wait()
    split.veto_tokens = veto_tokens
    first, answer = split.submit(prompt)
    report = answer.wait().report
    first.wait()
    assert report is not None and report.transfer is not None
    assert (report.cached_tokens, report.loaded_tokens, report.computed_tokens) == (8, loaded, 22 - loaded)
    assert (report.transfer.outcome, report.transfer.reason) == ("done", "" if loaded else "vetoed")
    assert answer.token_ids == reference(prompt, max_tokens=6)


def test_the_second_turn_moves_only_what_is_new(split: Split) -> None:
    prompt = prompt_of(30)
    _, answer = split.submit(prompt)
    answer.wait()
    prompt = [*prompt, *answer.token_ids, *prompt_of(10, start=5)]
    _, answer = split.submit(prompt)
    report = answer.wait().report
    assert report is not None and report.cached_tokens == 32 and report.loaded_tokens == len(prompt) - 1 - 32
    assert answer.token_ids == reference(prompt, max_tokens=6)


def test_many_at_once(split: Split) -> None:
    prompts = [prompt_of(3 + 4 * i, start=i % 4) for i in range(12)]
    answers = [split.submit(prompt, decode_first=i % 2 == 0, seed=i)[1] for i, prompt in enumerate(prompts)]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        answer.wait()
        assert answer.token_ids == reference(prompt, max_tokens=6, seed=i)


def test_small_caches_preempt_and_wait_but_change_nothing(network: Network) -> None:
    split = Split(network, prefill_blocks=14, decode_blocks=14)
    prompts = [prompt_of(9 + 3 * i, start=i) for i in range(10)]
    answers = []
    for i, prompt in enumerate(prompts):
        answers.append(split.submit(prompt, decode_first=i % 2 == 0, seed=i, max_tokens=17)[1])
        answers.append(split.prefill.submit(prompt, seed=i, max_tokens=17))
        answers.append(split.decode.submit(prompt, seed=i, max_tokens=17))
    for i, answer in enumerate(answers):
        answer.wait()
        assert answer.token_ids == reference(prompts[i // 3], max_tokens=17, seed=i // 3)
    split.close()


def test_prefill_aborted_half_way_is_recomputed_by_decode(split: Split) -> None:
    gate = Gate()
    split.prefill.runner.before = gate
    prompt, name = prompt_of(30), split.transfer_id()
    first = split.prefill.submit(prompt, max_tokens=1, request_id="p", transfer=split.params("prefill", name))
    answer = split.decode.submit(prompt, transfer=split.params("decode", name))
    gate.wait_arrived(1)
    gate.let_through(1)
    gate.wait_arrived(2)
    split.prefill.engine.abort("p")
    gate.let_through()
    assert first.wait().finish_reason == "abort"
    report = answer.wait().report
    assert answer.token_ids == reference(prompt, max_tokens=6)
    assert report is not None and report.loaded_tokens == 0 and report.computed_tokens == 30
    assert report.transfer is not None and report.transfer.outcome == "failed"
    assert split.decode.engine.statistics().kv_recomputed_tokens_total == 29


def test_decode_aborted_half_way_frees_both_sides(split: Split) -> None:
    gate = Gate()
    split.prefill.runner.before = gate
    prompt, name = prompt_of(30), split.transfer_id()
    first = split.prefill.submit(prompt, max_tokens=1, transfer=split.params("prefill", name))
    answer = split.decode.submit(prompt, request_id="d", transfer=split.params("decode", name))
    gate.wait_arrived(1)
    gate.let_through(1)
    gate.wait_arrived(2)
    split.decode.engine.abort("d")
    assert answer.wait().finish_reason == "abort"
    gate.let_through()
    first.wait()
    split.prefill.wait_free()
    split.decode.wait_free()


def test_an_abort_frees_the_blocks_of_both_sides_one_step_later() -> None:
    split = Split(LoopbackNetwork())
    gate = Gate()
    split.prefill.runner.before = gate
    name = split.transfer_id()
    split.prefill.submit(prompt_of(30), max_tokens=1, request_id="p", transfer=split.params("prefill", name))
    split.decode.submit(prompt_of(30), request_id="d", transfer=split.params("decode", name))
    gate.wait_arrived(1)
    for worker, request_id in ((split.decode, "d"), (split.prefill, "p")):
        worker.engine.abort(request_id)
        gate.let_through()
        worker.submit([1], max_tokens=1).wait()  # the step that obeys the abort, or the one after it
        assert worker.engine.statistics().num_free_blocks == worker.num_blocks
    split.close()


def test_a_digest_that_differs_is_recomputed(split: Split) -> None:
    name = split.transfer_id()
    split.prefill.submit(prompt_of(20), max_tokens=1, transfer=split.params("prefill", name)).wait()
    other = prompt_of(20, start=1)
    answer = split.decode.submit(other, transfer=split.params("decode", name))
    report = answer.wait().report
    assert answer.token_ids == reference(other, max_tokens=6)
    assert report is not None and report.transfer is not None and report.transfer.reason == "digest_mismatch"


def test_another_model_on_the_other_side_is_recomputed(network: Network) -> None:
    other = Fingerprint(
        model="other",
        dtype="bytes",
        num_layers=3,
        num_kv_heads=1,
        head_size=4,
        block_size=4,
        layout="token-major",
    )
    split = Split(network, decode_fingerprint=other)
    first, answer = split.submit(prompt_of(20))
    report = answer.wait().report
    assert answer.token_ids == reference(prompt_of(20), max_tokens=6)
    assert report is not None and report.transfer is not None and report.transfer.reason == "handshake"
    first.wait()
    split.close()


def test_prefill_dies_while_decode_waits(split: Split) -> None:
    gate = Gate()
    split.prefill.runner.before = gate
    first, answer = split.submit(prompt_of(30))
    gate.wait_arrived(1)
    gate.let_through(1)
    gate.wait_arrived(2)
    split.sender.close()
    report = answer.wait().report
    assert answer.token_ids == reference(prompt_of(30), max_tokens=6)
    assert report is not None and report.loaded_tokens == 0
    gate.let_through()
    assert first.wait().finish_reason == "length"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_request_ends_right_and_nothing_leaks(network: Network, seed: int) -> None:
    rng = random.Random(seed)
    split = Split(network, prefill_blocks=rng.choice([12, 20, 40]), decode_blocks=rng.choice([12, 20, 40]))
    entries: list[tuple[Worker, Answer, list[int], int, int]] = []
    for i in range(40):
        prompt, max_tokens = prompt_of(rng.randint(1, 24), start=rng.randint(0, 2)), rng.randint(1, 20)
        kind = rng.choice(["split", "split", "local", "abort", "check"])
        if kind == "split":
            first, answer = split.submit(prompt, max_tokens=max_tokens, decode_first=rng.random() < 0.5, seed=i)
            entries += [(split.prefill, first, prompt, 1, i), (split.decode, answer, prompt, max_tokens, i)]
        elif kind == "local":
            worker = rng.choice([split.prefill, split.decode])
            entries.append((worker, worker.submit(prompt, max_tokens=max_tokens, seed=i), prompt, max_tokens, i))
        elif kind == "abort" and entries:
            worker, answer, *_ = rng.choice(entries)
            worker.engine.abort(answer.request_id)
        else:
            split.check()
    for _, answer, prompt, max_tokens, seed_ in entries:
        last = answer.wait()
        expected = reference(prompt, max_tokens=max_tokens, seed=seed_)
        assert answer.token_ids == expected[: len(answer.token_ids)]
        assert last.finish_reason in ("length", "abort")
        assert last.finish_reason == "abort" or answer.token_ids == expected
    split.close()


class Mesh:
    """Two workers that serve both roles; each prefills for the other."""

    def __init__(self, network: Network, num_blocks: int) -> None:
        self.senders, self.workers = [], []
        for _ in range(2):
            memory = make_memory(num_blocks)
            self.senders.append(network.sender(memory, fingerprint()))
            self.workers.append(
                Worker(memory=memory, sender=self.senders[-1], receiver=network.receiver(memory, fingerprint()))
            )

    def params(self, role: Role, number: int, prefill: int) -> TransferParams:
        host, port = self.senders[prefill].address
        return TransferParams(v=1, transfer_id=f"{number:032x}", role=role, host=host, port=port, expires=2e9)


@pytest.mark.parametrize("same_worker", [False, True])
def test_workers_do_not_wait_for_each_other_for_ever(network: Network, same_worker: bool) -> None:
    """Each decode leg parks first and holds the blocks that the prefill leg of the other one needs."""
    mesh = Mesh(network, num_blocks=10)
    prompts = [prompt_of(30), prompt_of(30, start=1)]
    decodes, prefills = [], []
    for number, prompt in enumerate(prompts):
        prefill = number if same_worker else 1 - number
        decodes.append(mesh.workers[number].submit(prompt, transfer=mesh.params("decode", number, prefill)))
    for number, prompt in enumerate(prompts):
        prefill = number if same_worker else 1 - number
        params = mesh.params("prefill", number, prefill)
        prefills.append(mesh.workers[prefill].submit(prompt, max_tokens=1, transfer=params))
    for answer in prefills:
        assert answer.wait().finish_reason == "length"
    for prompt, answer in zip(prompts, decodes, strict=True):
        answer.wait()
        assert answer.token_ids == reference(prompt, max_tokens=6)
    for worker in mesh.workers:
        worker.engine.check()
        worker.engine.shutdown()
        worker.assert_empty()


def test_pinned_blocks_have_a_bound(split: Split) -> None:
    """Decode is late with all of its legs: what prefill cannot keep it gives up, and decode computes that itself."""
    prompts = [prompt_of(40, start=100 * n) for n in range(5)]  # 10 of 64 blocks each; 32 may be pinned
    names = [split.transfer_id() for _ in prompts]
    for prompt, name in zip(prompts, names, strict=True):
        split.prefill.submit(prompt, max_tokens=1, transfer=split.params("prefill", name)).wait()
    split.prefill.wait_pinned(30)  # what is given up ends in another thread
    assert split.prefill.engine.statistics().max_pinned_blocks == 32
    loaded = []
    for prompt, name in zip(prompts, names, strict=True):
        answer = split.decode.submit(prompt, transfer=split.params("decode", name))
        report = answer.wait().report
        assert answer.token_ids == reference(prompt, max_tokens=6)
        assert report is not None and report.transfer is not None
        loaded.append((report.loaded_tokens, report.transfer.reason))
    assert loaded == [(39, "")] * 3 + [(0, "pinned_bound")] * 2
    split.prefill.wait_free()


def test_inverted_order_needs_no_deadline(network: Network) -> None:
    """Prefill is full of finished sends, decode of loads for the prefills that find no room: each in the other's order.

    Without the rules about pinned blocks only open_timeout_s would end this, and that no test waits for.
    """
    split = Split(network, prefill_blocks=20, decode_blocks=20)
    prompts = [prompt_of(34, start=100 * n) for n in range(6)]  # 9 blocks each
    names = [split.transfer_id() for _ in prompts]
    firsts = [
        split.prefill.submit(prompt, max_tokens=1, transfer=split.params("prefill", name))
        for prompt, name in zip(prompts, names, strict=True)
    ]
    answers = [
        split.decode.submit(prompt, max_tokens=2, transfer=split.params("decode", name))
        for prompt, name in reversed(list(zip(prompts, names, strict=True)))
    ]
    for answer in (*firsts, *answers):
        answer.wait()
    for prompt, answer in zip(reversed(prompts), answers, strict=True):
        assert answer.token_ids == reference(prompt, max_tokens=2)
    split.close()
