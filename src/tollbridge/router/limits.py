"""The router's own deadlines and bounds, for which the cluster file has no key."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_timeout_s: float = 5.0
    poll_interval_s: float = 1.0  # between two health checks of a worker
    return_interval_s: float = 0.25  # the same while it is not ready: its return must be noticed
    head_timeout_s: float = 10.0  # deadline for the client to send the head of a request
    body_timeout_s: float = 60.0  # the same for its whole body
    body_idle_s: float = 10.0  # how long a body may stand still
    linger_s: float = 2.0  # how long a refused body is read and thrown away, so that the client sees the answer
    max_connections: int = 8192  # of clients
    max_bodies_bytes: int = 512 << 20  # request bodies being received, all together
    max_waiting_bytes: int = 256 << 20  # request bodies of those that wait for a place
    check_timeout_s: float = 2.0  # deadline of one health check
    first_list_s: float = 5.0  # how long the start waits until it is known who serves
    first_patience_s: float = 10.0  # the same of a request, where that was not enough
    timeouts_until_down: int = 3  # a busy worker may miss a check; a refused connection counts at once
    timeouts_until_lost: int = 10  # then the requests that wait for it are retried elsewhere or end in an error
    retry_fraction: float = 0.2  # further attempts per request, over the whole router
    retry_burst: int = 64  # further attempts saved up
    max_retries: int = 2  # of one request, before its first byte, because of its decode worker
    max_continuations: int = 4  # of one stream
    detokenize_timeout_s: float = 2.0  # before a stream is continued
    params_valid_s: float = 60.0  # lifetime of signed kv_transfer_params
    push_patience_s: float = 30.0  # NixlPushConnector keeps complete KV so long; then decode would wait for ever
    prefill_grace_s: float = 0.25  # how long the end of an answer waits for the prefill leg's report
    drain_s: float = 30.0  # SIGTERM: how long running requests may take to finish
    keepalive_s: float = 2.0  # below uvicorn's 5 s, so that a worker never closes a connection we are about to use
    max_answer_bytes: int = 256 << 20  # a whole (non-streaming) answer
    max_prompts: int = 4096  # in one request
    max_prompts_at_once: int = 32  # of one request, when a list of prompts is taken apart
    max_event_bytes: int = 8 << 20  # one server-sent event
    num_decisions: int = 1024  # remembered for /decisions
    tokenize_timeout_s: float = 0.5  # then the prompt is looked up by its text
    max_tokenize_bytes: int = 1 << 20  # a longer prompt is looked up by its text
    remembered_token_bytes: int = 64 << 20  # ids of prompts seen before, four bytes each
    index_entries: int = 1 << 20  # blocks in the prefix index, counted for each worker that has one
    index_entries_per_worker: int = 1 << 18
    trial_interval_s: float = 1.0  # between two looks for a link that nobody knows
    trial_after_s: float = 3.0  # for so long a link may be learnt from clients' requests instead
    trial_again_s: float = 60.0  # between two trials of a link; after failures twice as long each time
    trial_timeout_s: float = 30.0
    trial_growing_s: float = 0.15  # what took less is followed by a longer prompt
    expect_told_s: float = 30.0  # how long a prompt that was sent counts as cached before the worker tells of it
    expect_alone_s: float = 600.0  # the same for a worker without KV events
