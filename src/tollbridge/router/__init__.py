"""The OpenAI-compatible door and the fleet it knows."""
