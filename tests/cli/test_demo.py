"""What the demo shows, and when it refuses to call a split verified."""

from __future__ import annotations

import pytest

from tollbridge.cli.client import Answer
from tollbridge.cli.demo import DemoError, check, figures, table
from tollbridge.cli.passage import prompt
from tollbridge.wire.decision import Choice, Decision, DecisionRecord, Happened
from tollbridge.wire.params import TransferReport, WorkerReport

TRANSFER = TransferReport(transfer_id="t", side="receive", outcome="done", payload_bytes=3 << 20, wire_s=0.5)


def answer(choice: Choice = "split", *, verified: bool | None = True, error: str = "") -> Answer:
    decision = Decision(id="r", policy="p", choice=choice, decode="d0", reason="forced", why="Asked for it.")
    happened = Happened(
        split_verified=verified,
        error=error,
        ttft_s=0.25,
        prompt_tokens=100,
        prefill_report=WorkerReport(role="prefill", prefill_s=0.2, computed_tokens=84, cached_tokens=16),
        decode_report=WorkerReport(role="decode", loaded_tokens=99, transfer=TRANSFER),
    )
    record = DecisionRecord(at=0, decision=decision, happened=happened)
    return Answer(text="", ttft_s=0.3, total_s=1.0, record=record)


def test_the_figures_of_a_split() -> None:
    shown = figures(answer())
    assert shown["KV payload shipped"] == "3.00 MiB"
    assert shown["seconds on the wire"] == "0.500 s"
    assert (shown["prompt tokens it had cached"], shown["prompt tokens it computed"]) == ("16", "84")
    assert shown["tokens loaded over the wire"] == "99"
    assert shown["verified"] == "true"


def test_the_table_has_a_column_for_each_path() -> None:
    shown = table({"split": answer(), "local": answer("local", verified=None)})
    assert [column.header for column in shown.columns] == ["", "split", "local"]
    assert shown.row_count == len(figures(answer()))


def test_a_verified_split_passes() -> None:
    check(answer())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (answer("local"), "was served local: Asked for it."),
        (answer(verified=False, error="It loaded 3 of 99."), "was not verified: It loaded 3 of 99."),
        (answer(verified=None), "the decode worker computed KV itself."),
        (Answer(text="", ttft_s=0, total_s=0, record=None), "kept no record"),
    ],
)
def test_anything_else_fails(given: Answer, sentence: str) -> None:
    with pytest.raises(DemoError) as caught:
        check(given)
    assert caught.value.message.endswith(sentence) or sentence in caught.value.message
    assert caught.value.exit_code == 1


def test_the_prompts_differ_from_the_first_word_on_and_are_long() -> None:
    split, local = prompt("split"), prompt("local")
    assert split.split()[0] != local.split()[0]
    assert len(split.split()) > 600
