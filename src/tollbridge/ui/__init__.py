"""The live dashboard: the router's state as one picture for all who look, and the static page that shows it."""
