"""The command `tollbridge`: find the command, run it, turn errors into one sentence and an exit code.

Exit codes: 0 ok, 1 runtime, 2 usage or configuration, 3 start-up (a supervisor must not restart), 130 Ctrl-C.
Commands are imported when they run: `tollbridge --help` must not pay for aiohttp, let alone for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from tollbridge import __version__
from tollbridge.errors import TollbridgeError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE

app = App(
    name="tollbridge",
    help="Serve an LLM with prefill and decode on separate workers, and split a request only when it pays.",
    help_format="plaintext",  # importing a Markdown renderer would take a quarter of the time that --help may take
    version=__version__,
)
model = App(name="model", help="Fetch models.")
probe = App(name="probe", help="Measure an engine or a link, for router and planner.")

# The first paragraph is for `tollbridge --help`, all of it for the command's own, where it hides the docstring.
_HELP = {
    "up": "Run router and workers on this machine.\n\n"
    "Without a cluster file: one prefill and one decode worker. The default model is fetched if it is missing. "
    "Ctrl-C stops everything; when any process ends, all do.",
    "chat": "Chat with a running router.\n\nThe API key, where the router wants one, is read from TOLLBRIDGE_API_KEY.",
    "demo": "Show one request split and one served locally.\n\n"
    "It starts a cluster of its own and stops it again. Exit code 1 unless the split is verified.",
    "top": "Watch a running router in the terminal.\n\n"
    "The figures of the dashboard at /ui. --json prints them once. "
    "The API key, where the router wants one, is read from TOLLBRIDGE_API_KEY.",
    "metrics": "Print the list of metrics as documentation, Grafana dashboard or alert rules.\n\n"
    "docs: Markdown; grafana: a dashboard to import; alerts: a rule file for Prometheus.",
    "router": "Run the router in the foreground.\n\n"
    "It prints one JSON line once it serves. It needs the cluster secret of the workers (TOLLBRIDGE_SECRET).",
    "worker": "Run one worker in the foreground.\n\n"
    "It prints one JSON line once it serves. It needs the cluster secret (TOLLBRIDGE_SECRET); on loopback it does "
    "without, and then takes part in no split.",
    "plan": "Say whether a split is worth it on your link, with your model.\n\n"
    "It needs a model's config.json for the size of its KV cache; for a verdict the speed of engine and link besides, "
    "measured by `tollbridge probe` or given.",
    "doctor": "Find out why splits do not happen.\n\n"
    "It examines the running cluster of the cluster file, that of a router, or two workers by URL: addresses, "
    "connectors, secret, fingerprints, clocks, and one verified split. One line each, with the mend. Exit code 1 when "
    "something is wrong. "
    "The secret is read from TOLLBRIDGE_SECRET, the router's API key from TOLLBRIDGE_API_KEY.",
    "sim": "Simulate a fleet, and compare policies on it.\n\n"
    "It runs the real scheduler, prefix index, cost model and policies, with time in place of engines and network. "
    "--search looks for the placement and ratio with the best goodput per GPU.",
    "bench": "Measure servers, and compare ways to be served.\n\n"
    "Each experiment is one command: `tollbridge bench interference` starts embedded workers and shows, in under three "
    "minutes, what a split buys and costs. Any OpenAI-compatible servers are compared with --arm NAME=URL. Every "
    "request is kept (records.jsonl); the report is one HTML file.",
    "deploy": "Write Kubernetes objects, or judge some.\n\n"
    "`deploy render` makes them from the cluster file (section deploy), `deploy validate` judges any manifests.",
    "engine": "Measure how fast an engine prefills and decodes.\n\n"
    "The server speaks OpenAI's API (vLLM, SGLang, `tollbridge worker`) and must be idle. It takes at most five "
    "minutes, or one with --quick, and writes calibration.json, which `tollbridge plan --calibration` and the router "
    "(`calibration` in the cluster file) read.",
    "link": "Measure what the network to another host carries, and our transfer on it.\n\n"
    "`tollbridge probe link serve --bind HOST:PORT` there, `tollbridge probe link HOST:PORT` here. Between hosts both "
    "need the cluster secret (TOLLBRIDGE_SECRET). It writes calibration.json for both directions, and says whether it "
    "is the network that is slow, or the transport.",
    "pull": "Fetch a model into the cache, once.\n\n"
    "`up` and `demo` do this by themselves. The cache is TOLLBRIDGE_HOME, by default ~/.cache/tollbridge.",
}

for _name in ("up", "chat", "demo", "router", "plan", "sim", "doctor", "top", "metrics"):
    app.command(f"tollbridge.cli.{_name}:{_name}", name=_name, help=_HELP[_name])
app.command("tollbridge.cli.worker:app", name="worker", help=_HELP["worker"])
app.command("tollbridge.cli.bench:app", name="bench", help=_HELP["bench"])
app.command("tollbridge.cli.deploy:app", name="deploy", help=_HELP["deploy"])
app.command(probe)
probe.command("tollbridge.cli.probe:engine", name="engine", help=_HELP["engine"])
probe.command("tollbridge.cli.probe_link:app", name="link", help=_HELP["link"])
app.command(model)
model.command("tollbridge.cli.model:pull", name="pull", help=_HELP["pull"])


def main() -> None:
    """Run the command of this process's arguments, and exit."""
    sys.exit(run(sys.argv[1:]))


def run(tokens: Sequence[str]) -> int:
    """Run one command; return its exit code. What goes wrong is told in one sentence on stderr."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        return _tell(" ".join(str(error).split()), EXIT_USAGE)
    except TollbridgeError as error:
        return _tell(error.message, error.exit_code)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt does not belong after "^C"
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it exits
        return EXIT_BROKEN_PIPE


def _tell(sentence: str, exit_code: int) -> int:
    print(f"tollbridge: {sentence}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
