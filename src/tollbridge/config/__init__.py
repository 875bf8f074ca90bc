"""The cluster file `tollbridge.yaml`: frozen structs with defaults, unknown keys refused. Loading is in `load`."""
