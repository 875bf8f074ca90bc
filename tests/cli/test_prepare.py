"""What is here is used, what is missing is fetched by a child process, and a failure says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tollbridge.cli import prepare
from tollbridge.cli.prepare import prepare_model
from tollbridge.errors import StartupError


class Notes:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, step: str, doing: str) -> None:
        self.lines.append(f"{step}: {doing}")

    def end(self, step: str, done: str) -> None:
        self.lines.append(f"{step}: {done}")

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOLLBRIDGE_HOME", str(tmp_path))
    return tmp_path / "models"


def pretend(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(prepare, "COMMAND", (sys.executable, "-c", script))


async def test_a_missing_model_is_fetched_and_the_progress_shown(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, f"import os, sys; print(sys.argv[1:]); os.makedirs({str(models / 'tiny')!r})")
    notes = Notes()
    assert await prepare_model("tiny", notes) == str(models / "tiny")
    assert notes.lines == ["model: fetching tiny, once", "  ['model', 'pull', 'tiny']", "model: tiny is there"]


async def test_the_default_model_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "pass")
    assert await prepare_model("smollm2", Notes()) == "smollm2"


async def test_what_is_here_is_not_fetched(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "raise SystemExit('no')")
    (models / "tiny").mkdir(parents=True)
    prepare.smollm2_folder().mkdir()
    notes = Notes()
    assert await prepare_model("tiny", notes) == str(models / "tiny")
    assert await prepare_model("smollm2", notes) == "smollm2"
    assert notes.lines == []


async def test_a_failure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "import sys; sys.exit('tollbridge: no wheel.')")
    with pytest.raises(StartupError, match=r"^the model tiny could not be fetched: no wheel\.$"):
        await prepare_model("tiny", Notes())


async def test_a_folder_is_checked(models: Path) -> None:
    models.mkdir()
    with pytest.raises(StartupError, match=r"has no config\.json"):
        await prepare_model(str(models), Notes())
    (models / "config.json").write_text("{}")
    assert await prepare_model(str(models), Notes()) == str(models)
