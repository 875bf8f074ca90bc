"""`tollbridge probe link`: what does the network between two hosts carry, and our transfer on it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tollbridge.cli.probe import Json, OutFile, check_out, now, progress, tell_written

app = App(name="link", help_format="plaintext")


@app.default
def link(
    address: Annotated[str, Parameter(help="HOST:PORT of `tollbridge probe link serve`.")],
    *,
    streams: Annotated[str, Parameter(help="Numbers of connections to try.")] = "1,2,4",
    from_: Annotated[str | None, Parameter(name="--from", help="This host's name in the cluster file.")] = None,
    to: Annotated[str | None, Parameter(help="The other host's.")] = None,
    out: OutFile = Path("calibration.json"),
    quick: Annotated[bool, Parameter(negative=(), show_default=False, help="Half a second for each case.")] = False,
    json: Json = False,
) -> int:
    """Measure goodput both ways, with plain sockets and with our transfer, and say which of them is slow."""
    import platform

    import msgspec

    from tollbridge.config.address import parse_address
    from tollbridge.config.calibration import merge_calibration
    from tollbridge.errors import ConfigError
    from tollbridge.probe.link import LinkEffort, LinkProbe
    from tollbridge.probe.link_text import render
    from tollbridge.probe.link_verdict import calibrated, verdict

    try:
        there = parse_address(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} {error}.") from None
    effort = LinkEffort(streams=_counts(streams), seconds=0.5 if quick else 2.0)
    check_out(out)
    here_name, there_name = from_ or platform.node(), to or there.host
    with progress() as tell, LinkProbe(there, secret(), effort=effort, tell=tell) as probe:
        report = probe.run()
    names = {"up": f"{here_name}>{there_name}", "down": f"{there_name}>{here_name}"}
    links = {names["up"]: calibrated(report, "up"), names["down"]: calibrated(report, "down")}
    found = {name: one for name, one in links.items() if one is not None}
    merge_calibration(out, links=found, measured_at=now())
    if json:
        says = [verdict(report, "up", here_name, there_name), verdict(report, "down", there_name, here_name)]
        print(msgspec.json.encode({"links": found, "report": report, "verdicts": says}).decode())
    else:
        tell_written(render(report, here_name, there_name), out, " and ".join(found) or "nothing")
    return 0


@app.command
def serve(*, bind: Annotated[str, Parameter(help="HOST:PORT; port 0 chooses one.")] = "127.0.0.1:7200") -> int:
    """Answer probes until Ctrl-C, one at a time. It prints one JSON line once it listens."""
    import json
    import signal

    from tollbridge.config.address import parse_address
    from tollbridge.errors import ConfigError
    from tollbridge.obs import logs
    from tollbridge.probe.link_server import LinkServer

    try:
        at = parse_address(bind)
    except ValueError as error:
        raise ConfigError(f"--bind is {bind!r}, but {error}.") from None
    logs.configure()
    server = LinkServer(at.host, at.port, secret())
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    print(json.dumps({"ready": "probe", "address": str(server.address)}), flush=True)
    server.serve()
    return 0


def secret() -> bytes:
    """Return the cluster secret of the environment, empty when there is none."""
    from tollbridge.config.cluster import SecretConfig
    from tollbridge.config.secret import maybe_secret

    return maybe_secret(SecretConfig()) or b""


def _counts(text: str) -> tuple[int, ...]:
    from tollbridge.errors import ConfigError
    from tollbridge.probe.link_wire import MAX_STREAMS

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= MAX_STREAMS for part in parts):
        raise ConfigError(f"--streams is {text!r}: give numbers from 1 to {MAX_STREAMS} such as 1,2,4.")
    return tuple(sorted({int(part) for part in parts}))
