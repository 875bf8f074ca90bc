"""KV between address spaces: knows bytes, tokens and blocks, not models."""
