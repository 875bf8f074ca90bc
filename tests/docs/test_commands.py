"""Every `tollbridge` command line in a code block of the documents has flags and values that the command takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_links import DOCUMENTS, ROOT
from tollbridge.cli.main import app

_BLOCK = re.compile(r"```(?:sh|bash)\n(.*?)```", re.DOTALL)
_ENDS = {"|", "&", "&&", ";", ">", "2>", "<"}
_ELLIPSIS = "..."  # of a line that is cut short


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command."""
    for block in _BLOCK.findall(path.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "tollbridge " in line else []
            starts = [at for at, word in enumerate(words) if word == "tollbridge" or word.endswith("bin/tollbridge")]
            for start in starts:
                rest = words[start + 1 :]
                yield rest[: next((at for at, word in enumerate(rest) if word in _ENDS), len(rest))]


def _commands() -> list[tuple[str, str]]:
    shown = [(str(path.relative_to(ROOT)), words) for path in DOCUMENTS for words in _lines(path)]
    return [(name, shlex.join(words)) for name, words in shown if words and _ELLIPSIS not in words]


def test_commands_are_found() -> None:
    assert ("README.md", "chat") in _commands() and len(_commands()) > 20


@pytest.mark.parametrize(("document", "line"), _commands())
def test_the_command_takes_it(document: str, line: str) -> None:
    app.parse_args(shlex.split(line), exit_on_error=False, print_error=False)
