"""Pure functions from the cluster file to objects as plain dicts; one module per kind of object."""
