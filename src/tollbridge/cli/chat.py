"""`tollbridge chat`: talk to a running router, and see after each answer which way it went."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from tollbridge.cli.client import Answer, Message, RouterClient
from tollbridge.errors import TollbridgeError

API_KEY_VARIABLE = "TOLLBRIDGE_API_KEY"


def chat(
    prompt: Annotated[str | None, Parameter(help="Ask this once; without it, chat until Ctrl-D.")] = None,
    /,
    *,
    url: Annotated[str, Parameter(help="Where the router is.")] = "http://127.0.0.1:8000",
    policy: Annotated[
        str | None, Parameter(help="Ask for a path: local or split. By default the router decides.")
    ] = None,
    max_tokens: Annotated[int, Parameter(help="The longest answer, in tokens.")] = 256,
) -> int:
    """Chat with the model behind a router. A router that wants a key reads it from TOLLBRIDGE_API_KEY."""
    if prompt is not None:
        _answer(url, [{"role": "user", "content": prompt}], policy, max_tokens)
    else:
        _talk(url, policy, max_tokens)
    return 0


def _talk(url: str, policy: str | None, max_tokens: int) -> None:
    """Read questions from stdin, keeping the conversation; an error ends one answer, not the chat.

    stdin is read outside of any event loop: a thread that waits for a line cannot be interrupted by Ctrl-C.
    """
    messages: list[Message] = []
    while (line := _read()) is not None:
        if not line.strip():
            continue
        question: Message = {"role": "user", "content": line}
        try:
            answer = _answer(url, [*messages, question], policy, max_tokens)
        except TollbridgeError as error:
            print(f"tollbridge: {error.message}", file=sys.stderr)
            continue
        messages += [question, {"role": "assistant", "content": answer.text}]


def _answer(url: str, messages: list[Message], policy: str | None, max_tokens: int) -> Answer:
    """Stream one answer to stdout, and what became of it to stderr."""
    answer = asyncio.run(_ask(url, messages, policy, max_tokens))
    print()
    Console(stderr=True).print(decision_line(answer), style="dim", highlight=False, markup=False, soft_wrap=True)
    return answer


async def _ask(url: str, messages: list[Message], policy: str | None, max_tokens: int) -> Answer:
    async with RouterClient(url, api_key=os.environ.get(API_KEY_VARIABLE)) as client:
        return await client.chat(messages, policy=policy, max_tokens=max_tokens, on_text=_show)


def decision_line(answer: Answer) -> str:
    """Return one line on which way the answer went: choice, workers, TTFT, and why."""
    timing = f"first token after {answer.ttft_s:.3f} s, all after {answer.total_s:.2f} s"
    if answer.record is None:
        return f"[no decision recorded; {timing}]"
    decision = answer.record.decision
    workers = f"{decision.prefill} -> {decision.decode}" if decision.prefill else decision.decode
    return f"[{decision.choice} on {workers}; {timing}; {decision.why.rstrip('.')}]"


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _read() -> str | None:
    """Return the next line of stdin, None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
