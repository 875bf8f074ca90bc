"""Tollbridge: prefill and decode on separate workers over ordinary Ethernet, split only when the split pays."""

__version__ = "0.1.0"
