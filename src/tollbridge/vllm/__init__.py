"""The vLLM plugin: `TollbridgeConnector` makes a stock `vllm serve` a Tollbridge worker. See docs/vllm.md.

vLLM builds one connector in the scheduler's process and one in every worker process; each step, the first hands the
second a message.

    connector.py   vLLM's interface, and nothing else: every method is one call
    scheduler.py   scheduler's process: which request sends or loads what, as a state machine per request
    orders.py      the message of one step
    worker.py      worker's process: carries the orders out on a KVSender and a KVReceiver
    blocks.py      a KV cache whose smallest piece is a block; layout.py says what its bytes mean
    support.py     what cannot be split, refused at start or served locally
    launch.py      argv and environment of `tollbridge worker vllm` (imports nothing of vLLM)

Only connector.py, stats.py and installed.py import vLLM, so that the rest is tested without it.
"""
