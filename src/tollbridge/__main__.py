"""The command `tollbridge`, also as `python -m tollbridge`: Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Load the command line and run it."""
    try:
        from tollbridge.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
