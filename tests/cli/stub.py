"""Stands in for `tollbridge worker` and `tollbridge router`: reads the cluster file, says it is ready, waits.

STUB_FAIL="d0=3" makes d0 exit with 3 before it is ready; STUB_DIE="d0=9" makes it exit with 9 at SIGUSR1;
STUB_HANG="router" makes the router send d0 that signal and never become ready. What each was given, and its pid, is
left in STUB_FOLDER/<name>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import yaml


def main() -> None:
    role, *_ = arguments = sys.argv[1:]
    name = arguments[arguments.index("--name") + 1] if role == "worker" else "router"
    path = Path(arguments[arguments.index("--config") + 1])
    folder = Path(os.environ["STUB_FOLDER"])
    given = {
        "pid": os.getpid(),
        "argv": sys.argv,
        "environ": dict(os.environ),
        "cluster": yaml.safe_load(path.read_text()),
        "modes": [oct(path.stat().st_mode & 0o777), oct(path.parent.stat().st_mode & 0o777)],
        "folder": str(path.parent),
    }
    (folder / f"{name}.json").write_text(json.dumps(given))
    if code := exit_code("STUB_FAIL", name):
        print(f"{name} cannot start", file=sys.stderr)
        sys.exit(code)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(exit_code("STUB_DIE", name)))
    if os.environ.get("STUB_HANG") == name:
        os.kill(json.loads((folder / "d0.json").read_text())["pid"], signal.SIGUSR1)
    else:
        say_ready(role, name)
    while True:
        signal.pause()


def exit_code(variable: str, name: str) -> int:
    who, _, code = os.environ.get(variable, "").partition("=")
    return int(code) if who == name else 0


def say_ready(role: str, name: str) -> None:
    ready = {"ready": role, "name": name, "url": f"http://127.0.0.1:{10_000 + len(name)}", "pid": os.getpid()}
    if role == "worker":
        ready |= {"kv": f"127.0.0.1:{20_000 + ord(name[0])}", "events": "tcp://127.0.0.1:3", "model": "stub"}
    print(json.dumps(ready), flush=True)


if __name__ == "__main__":
    main()
