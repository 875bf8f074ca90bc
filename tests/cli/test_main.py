"""The front door: quick, without torch, and every error is one sentence with the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tollbridge import __main__
from tollbridge.cli import main
from tollbridge.errors import ConfigError, StartupError, TollbridgeError

HEAVY = ("torch", "transformers", "aiohttp", "numpy", "yaml")
MAX_HELP_CPU_S = 3.0  # generous: a busy machine must not fail it; benchmarks/claims/cli-start holds it to 0.3 s


@pytest.fixture(autouse=True)
def no_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)


def test_help_is_cheap_and_names_every_command() -> None:
    script = f"""
import json, resource, sys
from tollbridge.cli.main import run
code = run(["--help"])
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([code, loaded, resource.getrusage(resource.RUSAGE_SELF).ru_utime]))
"""
    *screen, last = python(script).stdout.splitlines()
    code, loaded, cpu_s = json.loads(last)
    assert (code, loaded) == (0, [])
    shown = "\n".join(screen)
    assert all(name in shown for name in ("up", "router", "worker", "chat", "model", "demo"))
    assert cpu_s < MAX_HELP_CPU_S


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["up"], "when any process ends, all do"),
        (["chat"], "is read from TOLLBRIDGE_API_KEY"),
        (["demo"], "unless the split is verified"),
        (["router"], "the cluster secret of the workers"),
        (["worker"], "takes part in no split"),
        (["probe", "engine"], "and must be idle"),
        (["probe", "link"], "the network that is slow, or the transport"),
        (["model", "pull"], "by default ~/.cache/tollbridge"),
    ],
)
def test_the_help_of_a_command_tells_more(tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*tokens, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    assert "[default: False]" not in shown


@pytest.mark.parametrize(
    "module", ["up", "chat", "demo", "router", "worker", "model", "stack", "prepare", "probe", "probe_link"]
)
def test_no_command_needs_torch_to_be_imported(module: str) -> None:
    script = f"import sys, tollbridge.cli.{module}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert python(script).stdout == "False False\n"


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tollbridge", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "0.1.0\n"


@pytest.mark.parametrize(
    ("tokens", "code", "sentence"),
    [
        (["bogus"], 2, 'Unknown command "bogus".'),
        (["up", "--prot", "1"], 2, "Did you mean --port"),
        (["up", "--port", "x"], 2, 'Invalid value for --port: unable to convert "x" into int.'),
        (["up", "--port", "70000"], 2, "--port: router.port is 70000, but must be"),
        (["up", "--config", "none.yaml"], 2, "none.yaml does not exist"),
        (["up", "--port", "0", "--model", "./none"], 3, "There is no model './none'"),
        (["worker"], 2, "--name requires an argument"),
        (["worker", "--name", "p1"], 2, 'the cluster file has no worker "p1": valid are p0, d0.'),
        (["router"], 2, 'workers[0].url is "http://127.0.0.1:0", which says "choose a port" to worker p0'),
        (["chat", "hi", "--url", "http://127.0.0.1:1"], 1, "nobody answers at http://127.0.0.1:1: start a router"),
        (["chat", "hi", "--url", "1"], 2, "is no URL"),
        (["model", "pull", "gpt"], 2, "Choose from"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_on_stderr(
    tokens: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(tokens) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tollbridge: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_ctrl_c_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "tollbridge.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tollbridge.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TollbridgeError("it broke."), 1),
        (ConfigError("it is wrong."), 2),
        (StartupError("it cannot."), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    assert main.run([]) == code


@pytest.mark.parametrize("command", [["up", "--port", "9"], ["router"], ["worker", "--name", "p0"]])
def test_print_config_reads_back(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLBRIDGE_MODEL", "elsewhere")
    assert main.run([*command, "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "# TOLLBRIDGE_MODEL" in out
    assert ("# --port" in out) == ("--port" in command)


def test_a_reader_that_leaves_is_no_error() -> None:
    script = "import sys; from tollbridge.cli.main import run; sys.exit(run(['up', '--print-config']))"
    command = f'{sys.executable} -c "{script}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""
