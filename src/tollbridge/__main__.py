"""`python -m tollbridge` is the command `tollbridge`."""

from tollbridge.cli.main import main

if __name__ == "__main__":
    main()
