"""Continuous batching: admission, chunking, preemption. Pure."""
