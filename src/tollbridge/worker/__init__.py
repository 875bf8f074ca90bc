"""The embedded engine's HTTP door: the same API and metric names as vLLM."""
