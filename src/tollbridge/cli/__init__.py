"""The command line, one file per command: `main` knows their names, and imports only the one that runs.

`stack` runs a whole cluster on this machine for `up` and `demo`; `client` talks to a router for `chat` and `demo`.
"""
