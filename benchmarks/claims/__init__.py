"""One module per claim, with DESCRIPTION and `run(quick) -> ClaimResult`: `cli_start.py` is the claim `cli-start`."""
