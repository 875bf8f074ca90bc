"""One module per experiment: what is run, and what is said about it."""
