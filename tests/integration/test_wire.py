"""The KV really comes over the wire: counted, corrupted and zeroed by a proxy outside both processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.kv_proxy import corrupt_payload, forward, zero_payloads
from tests.support.stack import Stack, complete, record, running
from tests.support.timing import TRIES

KAPPA = 4 * 2 * 2 * 16 * 4  # tiny model in float32: layers x (K, V) x KV heads x head size x bytes


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with running(Stack(tmp_path_factory.mktemp("wire"), str(tiny_model_dir))) as running_stack:
        yield running_stack


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


def draw(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(4, 255) for _ in range(n)]


def shipped(stack: Stack) -> tuple[int, int]:
    """Return (payload bytes, header bytes of data frames) that left prefill so far, as the proxy counted them."""
    return stack.wire.payload_bytes, stack.wire.header_bytes


@pytest.mark.parametrize("n", [2, 16, 17, 18, 100, 129, 400])
def test_bytes_on_the_wire_are_exactly_the_tokens_decode_lacked(stack: Stack, rng: random.Random, n: int) -> None:
    from tollbridge.transfer.frames import HEADER_BYTES

    payload_before, header_before = shipped(stack)
    answer = complete(stack, draw(rng, n), "split")
    report = record(stack, answer)["happened"]["decode_report"]
    payload, header = (now - then for now, then in zip(shipped(stack), (payload_before, header_before), strict=True))
    assert payload == KAPPA * (n - 1)
    assert header == HEADER_BYTES * report["transfer"]["num_frames"]
    assert report["transfer"]["payload_bytes"] == payload
    assert report["loaded_tokens"] == n - 1


def test_second_request_with_the_same_prefix_ships_only_what_decode_lacks(stack: Stack, rng: random.Random) -> None:
    prefix = draw(rng, 160)
    complete(stack, prefix + draw(rng, 40), "split")
    before, _ = shipped(stack)
    answer = complete(stack, prefix + draw(rng, 70), "split")
    after, _ = shipped(stack)
    assert after - before == KAPPA * (230 - 1 - 160)
    assert record(stack, answer)["happened"]["decode_report"]["cached_tokens"] == 160


def test_one_corrupted_byte_makes_decode_recompute_and_the_answer_stays_right(stack: Stack, rng: random.Random) -> None:
    prompt = draw(rng, 200)
    stack.wire.fault = corrupt_payload(2)
    answer = complete(stack, prompt, "split")
    happened = record(stack, answer)["happened"]
    assert happened["decode_report"]["transfer"]["reason"] == "checksum"
    assert happened["split_verified"] is False
    assert happened["decode_report"].get("loaded_tokens", 0) == 0
    stack.wire.fault = forward
    # d0 now holds the prompt's blocks, p0 too: the local answer on either must agree with what decode recomputed.
    assert complete(stack, prompt, "local").token_ids == answer.token_ids
    assert stack.metric("d0", "tollbridge:kv_recomputed_tokens_total") >= 199


def test_zeroed_kv_with_fitting_checksums_changes_the_answer(stack: Stack, rng: random.Random) -> None:
    """Decode really reads what came over the wire: it does not recompute behind our back."""
    prompt = draw(rng, 200)
    stack.wire.fault = zero_payloads()
    zeroed = complete(stack, prompt, "split", max_tokens=24, cache_salt="zeroed")
    stack.wire.fault = forward
    honest = complete(stack, prompt, "split", max_tokens=24, cache_salt="honest")
    assert record(stack, zeroed)["happened"]["split_verified"] is True
    assert zeroed.token_ids != honest.token_ids
    assert complete(stack, prompt, "local", max_tokens=24, cache_salt="local").token_ids == honest.token_ids


def test_layers_leave_while_prefill_runs(stack: Stack, rng: random.Random) -> None:
    """The first KV byte passes the proxy before prefill has finished its last chunk.

    Had the KV left only after prefill, decode would have waited for at least the whole of it, every time; a busy
    machine holds it up now and then.
    """
    for _ in range(TRIES):
        answer = complete(stack, draw(rng, 1500), "split", max_tokens=2)
        happened = record(stack, answer)["happened"]
        transfer = happened["decode_report"]["transfer"]
        prefill_s = happened["prefill_report"]["prefill_s"]
        in_pieces = transfer["num_frames"] >= 4 * (1500 // 128)  # a sender that was held up sends fewer, larger ones
        if in_pieces and transfer.get("wait_s", 0.0) < 0.5 * prefill_s and transfer["wire_s"] > 0.4 * prefill_s:
            return
    raise AssertionError(f"{transfer}, prefill {prefill_s} s")


def test_peer_without_the_secret_gets_no_kv(stack: Stack, rng: random.Random) -> None:
    """Forged params are refused by the worker; nothing is shipped."""
    from tests.support.stack import post

    before, _ = shipped(stack)
    params = {
        "v": 1, "transfer_id": "0" * 32, "role": "prefill", "host": "127.0.0.1", "port": 1,
        "expires": 4e9, "sig": "00",
    }  # fmt: skip
    body = {"prompt": draw(rng, 20), "max_tokens": 1, "kv_transfer_params": {"tollbridge": params}}
    assert post(stack.worker_url("p0") + "/v1/completions", body).status == 401
    # The router strips the field, so the same body is served as an ordinary request.
    assert post(stack.url + "/v1/completions", body).status == 200
    assert shipped(stack)[0] == before
