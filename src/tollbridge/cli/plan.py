"""`tollbridge plan`: should I split, on this link, with this model, for this traffic?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def plan(
    file: Annotated[Path | None, Parameter(help="A plan file (docs/plan.md); options override it.")] = None,
    *,
    model: Annotated[str | None, Parameter(help="Folder, config.json, or a hub id in the local cache.")] = None,
    kv_dtype: Annotated[
        str | None, Parameter(help="bf16, fp16, fp32, fp8 or int8; default: that of the weights.")
    ] = None,
    calibration: Annotated[Path | None, Parameter(help="Written by `tollbridge probe`.")] = None,
    gpu: Annotated[str | None, Parameter(help="From the catalogue, where nothing was measured, e.g. L40S.")] = None,
    prefill_per_token: Annotated[str | None, Parameter(help='Measured, e.g. "73.2 us".')] = None,
    decode_step: Annotated[str | None, Parameter(help='Measured, e.g. "22 ms".')] = None,
    goodput: Annotated[
        list[str] | None, Parameter(help='Of the link, once or as lowest and highest: "4.6 Gb/s".')
    ] = None,
    prompt_tokens: Annotated[list[int] | None, Parameter(help="Prompt lengths to judge; may be repeated.")] = None,
    output_tokens: int | None = None,
    concurrency: Annotated[int | None, Parameter(help="Requests in flight in all.")] = None,
    gpus: int | None = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False, help="Print one JSON document.")] = False,
    html: Annotated[Path | None, Parameter(help="Write one page with plots.")] = None,
) -> int:
    """Say whether a split is worth it here, and why."""
    import msgspec

    from tollbridge.config.calibration import read_calibration
    from tollbridge.errors import ConfigError
    from tollbridge.plan.inputs import DecodeInput, LinkInput, PlanInput, PrefillInput, read_plan
    from tollbridge.plan.plan import make_plan

    replace = msgspec.structs.replace
    given = read_plan(file) if file else PlanInput()
    engine = given.engine
    engine = replace(engine, gpu=gpu) if gpu else engine
    engine = replace(engine, prefill=PrefillInput(per_token=prefill_per_token)) if prefill_per_token else engine
    engine = replace(engine, decode=DecodeInput(step=decode_step)) if decode_step else engine
    work = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "concurrency": concurrency}
    given = replace(
        given,
        model=model or given.model,
        kv_dtype=kv_dtype or given.kv_dtype,
        engine=engine,
        links=[LinkInput(goodput=list(goodput))] if goodput else given.links,
        workload=replace(given.workload, **{name: value for name, value in work.items() if value is not None}),
        gpus=given.gpus if gpus is None else gpus,
    )
    made = make_plan(given, read_calibration(calibration) if calibration else None)
    if html is not None:
        from tollbridge.plan.page import page

        try:
            html.write_text(page(made))
        except OSError as error:
            raise ConfigError(f"The page {html} cannot be written: {error.strerror}.", param="html") from None
    if json:
        print(msgspec.json.encode(made).decode())
    else:
        from rich.console import Console

        from tollbridge.plan.text import render

        Console().print(render(made))
    return 0
