"""Thousands of transfers under faults. `simulation` runs the real TCP medium on a simulated network, one thread and a
manual clock, so that a seed reproduces a run; `sockets` runs it on real sockets and threads through a proxy.
"""
