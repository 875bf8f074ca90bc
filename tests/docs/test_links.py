"""Every relative link in the documents leads to a file, and to a heading in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def _prose(path: Path) -> str:
    return _CODE.sub("", path.read_text())


def _anchors(path: Path) -> set[str]:
    """Return the anchors that a page of `path` has, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", _prose(path), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def test_the_documents_are_found() -> None:
    assert ROOT / "README.md" in DOCUMENTS and ROOT / "docs" / "vllm.md" in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in _LINK.findall(_prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert broken == []


def test_documents_named_in_the_code_exist() -> None:
    """Messages and comments that send a reader to docs/NAME.md, or to a heading there."""
    files = [path for folder in ("src", "benchmarks", "deploy") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in files for name in re.findall(r"docs/[\w-]+\.md", path.read_text())}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []
