"""The HTTP door of the embedded engine: the same API, metric names and KV events as a vLLM server.

A request's way: `app` (route) -> `admission` (body, `parse`, `prompts`, `sampling`; its role: `legs` ③⑤) -> `job`
-> `serving` -> `generation` (engine thread -> event loop over `bridge`) -> `answers` (bytes out, ⑥). `main` starts and
ends the process.
"""
