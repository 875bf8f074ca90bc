"""`tollbridge demo`: one request split, one served locally, on a stack of its own; and what each of them really did.

It ends with exit code 1 unless the router verified that the decode worker loaded the KV it lacked over the wire.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from tollbridge.cli.client import Answer, RouterClient
from tollbridge.cli.display import make_display
from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.cli.launch import launched
from tollbridge.cli.options import ConfigFile, configure
from tollbridge.cli.passage import prompt
from tollbridge.config.cluster import ClusterConfig
from tollbridge.config.secret import secret_for_local
from tollbridge.errors import TollbridgeError

MAX_TOKENS = 64
PATHS = ("split", "local")
_NONE = "-"
REMARK = (
    "The answers differ because the prompts do, in their first sentence: so neither finds the other's KV cached.\n"
    "Router and workers are stopped again; `up` leaves them running."
)


class DemoError(TollbridgeError):
    """The demo ran, but did not show what it promises."""


def demo(
    *,
    config: ConfigFile = None,
    model: Annotated[str | None, Parameter(help="smollm2, tiny (random weights), a folder, or a hub id.")] = None,
) -> int:
    """Start a stack, serve one chat request split and one locally, show what each cost, and clean up."""
    cluster = configure(config, model=model, port=0).cluster
    secret = secret_for_local(cluster)
    return asyncio.run(run_interruptible(partial(_show, cluster, secret)))


async def _show(cluster: ClusterConfig, secret: bytes, interrupts: Interrupts) -> int:
    with make_display() as display:
        async with launched(cluster, secret, display, interrupts) as stack:
            display.begin("demo", "asking twice")
            answers = await _ask_twice(stack.url)
            display.end("demo", "answered twice")
    console = Console()
    for policy, answer in answers.items():
        console.print(Panel(answer.text.strip(), title=f"the answer by {policy}", title_align="left"))
    console.print(table(answers))
    console.print(f"Split because: {_why(answers['split'])}\nLocal because: {_why(answers['local'])}", highlight=False)
    check(answers["split"])
    console.print("[green]The split is verified: the decode worker loaded over the wire every token of KV it lacked.")
    console.print(REMARK, highlight=False)
    return 0


async def _ask_twice(url: str) -> dict[str, Answer]:
    """Ask by split, then locally. The prompts differ from their first sentence on: only the template can be cached."""
    async with RouterClient(url) as client:
        for policy in PATHS:  # the first request of a fresh process pays for lazy imports and cold caches
            await _ask(client, policy, f"Hello by {policy}!", max_tokens=2)
        return {policy: await _ask(client, policy, prompt(policy), max_tokens=MAX_TOKENS) for policy in PATHS}


async def _ask(client: RouterClient, policy: str, content: str, *, max_tokens: int) -> Answer:
    messages = [{"role": "user", "content": content}]
    return await client.chat(messages, policy=policy, max_tokens=max_tokens, temperature=0)


def check(answer: Answer) -> None:
    """Raise DemoError unless `answer` was split and the router verified it."""
    if answer.record is None:
        raise DemoError("the router kept no record of the split request, so nothing is verified.")
    decision, happened = answer.record.decision, answer.record.happened
    if decision.choice != "split":
        raise DemoError(f"the request that asked for a split was served {decision.choice}: {decision.why}")
    if not happened.split_verified:
        raise DemoError(f"the split was not verified: {happened.error or 'the decode worker computed KV itself.'}")


def table(answers: dict[str, Answer]) -> Table:
    """Return what the requests cost, one column each."""
    shown = Table(title="What each request cost", title_justify="left")
    shown.add_column("")
    for policy in answers:
        shown.add_column(policy, justify="right")
    columns = [figures(answer) for answer in answers.values()]
    for name in columns[0]:
        shown.add_row(name, *(column[name] for column in columns))
    return shown


def figures(answer: Answer) -> dict[str, str]:
    """Return the rows of one request, by label."""
    record = answer.record
    if record is None:
        return {"time to first token": f"{answer.ttft_s:.3f} s"}
    happened, decision = record.happened, record.decision
    prefill, decode = happened.prefill_report, happened.decode_report
    computing = prefill or decode
    transfer = decode.transfer if decode else None
    return {
        "decision": decision.choice,
        "workers": f"{decision.prefill} -> {decision.decode}" if decision.prefill else decision.decode,
        "time to first token (client)": f"{answer.ttft_s:.3f} s",
        "time to first token (router)": _seconds(happened.ttft_s),
        "whole answer (client)": f"{answer.total_s:.3f} s",
        "prompt tokens": str(happened.prompt_tokens),
        "prefill": _seconds(computing.prefill_s if computing else None),
        "prompt tokens it had cached": str(computing.cached_tokens) if computing else _NONE,
        "prompt tokens it computed": str(computing.computed_tokens) if computing else _NONE,
        "tokens loaded over the wire": str(decode.loaded_tokens) if decode else _NONE,
        "KV payload shipped": _mib(transfer.payload_bytes) if transfer else _NONE,
        "KV carried by": transfer.medium if transfer else _NONE,
        "seconds on the wire": _seconds(transfer.wire_s if transfer else None),
        "verified": _NONE if happened.split_verified is None else str(happened.split_verified).lower(),
        "completion tokens": str(happened.completion_tokens),
    }


def _why(answer: Answer) -> str:
    return answer.record.decision.why if answer.record else "nobody recorded it."


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds:.3f} s"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"
