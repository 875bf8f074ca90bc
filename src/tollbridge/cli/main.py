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

app.command("tollbridge.cli.up:up", name="up", help="Run router and workers on this machine.")
app.command("tollbridge.cli.chat:chat", name="chat", help="Chat with a running router.")
app.command("tollbridge.cli.demo:demo", name="demo", help="Show one request split and one served locally.")
app.command("tollbridge.cli.router:router", name="router", help="Run the router in the foreground.")
app.command("tollbridge.cli.worker:worker", name="worker", help="Run one worker in the foreground.")
app.command(model)
model.command("tollbridge.cli.model:pull", name="pull", help="Fetch a model into the cache, once.")


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
