"""What is worth looking at, and what is worth waking somebody for: queries over the metrics of `catalogue`.

Grafana's dashboard and Prometheus' alert rules are made from these two lists.
"""

from __future__ import annotations

from typing import Literal

import msgspec

_R = "tollbridge_router_"


class Query(msgspec.Struct, frozen=True):
    expr: str
    legend: str


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One graph. `unit` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""


class Row(msgspec.Struct, frozen=True):
    title: str
    panels: tuple[Panel, ...]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One alert. `hold` is how long it must be true, as Prometheus writes it."""

    name: str
    expr: str
    hold: str
    severity: Literal["critical", "warning"]
    summary: str
    action: str


def _rate(name: str, by: str = "", where: str = "", span: str = "$__rate_interval") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({_R}{name}{where}[{span}]))"


def _quantile(share: float, name: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, {_rate(name + '_bucket', by)})"


def _worker(name: str) -> str:
    return f"sum by (instance, side) (rate({name}[$__rate_interval]))"


ROWS = (
    Row("Is splitting paying off?", (
        Panel(title="Toll paid, stall avoided", unit="s", text="Seconds in each second.", queries=(
            Query(_rate("stall_avoided_seconds_total"), "stall avoided"), Query(_rate("toll_seconds_total"), "toll paid"))),
        Panel(title="Requests by path and reason", unit="reqps", queries=(
            Query(_rate("requests_total", "choice, reason"), "{{choice}}: {{reason}}"),)),
        Panel(title="Splits whose KV arrived", unit="percentunit", queries=(
            Query(f"{_rate('split_verified_total')} / ({_rate('split_verified_total')} + ({_rate('split_unverified_total')} or vector(0)))",
                  "verified"),)),
    )),
    Row("What clients see", (
        Panel(title="Time to first token", unit="s", queries=(
            Query(_quantile(0.5, "time_to_first_token_seconds", "le, choice"), "p50 {{choice}}"),
            Query(_quantile(0.95, "time_to_first_token_seconds", "le, choice"), "p95 {{choice}}"))),
        Panel(title="Longest gap of a stream", unit="s", queries=(
            Query(_quantile(0.5, "longest_gap_seconds", "le, choice"), "p50 {{choice}}"),
            Query(_quantile(0.95, "longest_gap_seconds", "le, choice"), "p95 {{choice}}"))),
        Panel(title="Gap between two tokens, workers", unit="s", queries=(
            Query("histogram_quantile(0.99, sum by (le, instance) (rate(vllm:inter_token_latency_seconds_bucket[$__rate_interval])))",
                  "p99 {{instance}}"),)),
        Panel(title="Goodput", unit="reqps", text="Requests that met both SLOs, of all that ended.", queries=(
            Query(_rate("slo_requests_total"), "within SLO"), Query(_rate("requests_total"), "ended"))),
        Panel(title="Requests inside and waiting", unit="short", queries=(
            Query(f"sum({_R}in_flight_requests)", "in flight"), Query(f"sum({_R}waiting_requests)", "waiting"))),
        Panel(title="Wait for a place", unit="s", queries=(
            Query(_quantile(0.95, "queue_seconds", "le, tenant"), "p95 {{tenant}}"),)),
        Panel(title="Errors, refusals, second attempts", unit="reqps", queries=(
            Query(_rate("requests_total", "outcome", '{outcome!="ok"}'), "{{outcome}}"),
            Query(_rate("refused_requests_total", "status"), "refused {{status}}"),
            Query(_rate("retries_total", "reason"), "again: {{reason}}"),
            Query(_rate("continuations_total", "outcome"), "broken stream: {{outcome}}"))),
    )),
    Row("KV transfers", (
        Panel(title="KV received", unit="Bps", queries=(Query(_rate("kv_payload_bytes_total"), "payload"),)),
        Panel(title="Goodput of the link, workers", unit="Bps", queries=(
            Query("tollbridge:transfer_goodput_bytes_per_second", "{{instance}} {{side}}"),
            Query("vllm:tollbridge_goodput_bytes_per_s", "{{instance}} vLLM"))),
        Panel(title="Why KV did not come", unit="reqps", queries=(
            Query(_rate("split_unverified_total", "reason"), "{{reason}}"),
            Query('sum by (reason) (rate(tollbridge:transfer_ends_total{outcome="failed"}[$__rate_interval]))', "{{reason}}, worker"))),
        Panel(title="Transfers under way", unit="short", queries=(
            Query("sum by (instance, side) (tollbridge:transfer_active)", "{{instance}} {{side}}"),)),
        Panel(title="Bytes on the wire", unit="Bps", queries=(
            Query(_worker("tollbridge:transfer_wire_bytes_total"), "{{instance}} {{side}}"),)),
    )),
    Row("Workers", (
        Panel(title="Ready", unit="short", queries=(Query(f"{_R}worker_ready", "{{worker}}"),)),
        Panel(title="KV cache used", unit="percentunit", queries=(Query("vllm:kv_cache_usage_perc", "{{instance}}"),)),
        Panel(title="Blocks held for decode, of their bound", unit="percentunit", queries=(
            Query("tollbridge:pinned_blocks / (tollbridge:max_pinned_blocks > 0)", "{{instance}}"),)),
        Panel(title="Running and waiting", unit="short", queries=(
            Query("vllm:num_requests_running", "{{instance}} running"), Query("vllm:num_requests_waiting", "{{instance}} waiting"))),
        Panel(title="Prompt tokens by source", unit="short", queries=(
            Query("sum by (instance, source) (rate(vllm:prompt_tokens_by_source_total[$__rate_interval]))", "{{instance}} {{source}}"),)),
        Panel(title="Prefix cache hits", unit="percentunit", text="As the router expected, and as the workers found.", queries=(
            Query(f"{_rate('cached_prompt_tokens_predicted_total')} / {_rate('cacheable_prompt_tokens_total')}", "expected"),
            Query(f"{_rate('cached_prompt_tokens_real_total')} / {_rate('cacheable_prompt_tokens_total')}", "found"))),
    )),
    Row("How well the router knows the fleet", (
        Panel(title="Predictions off by", unit="percentunit", queries=(
            Query(_quantile(0.5, "prediction_error_ratio", "le, kind"), "{{kind}}"),)),
        Panel(title="Bias of predictions", unit="percentunit", queries=(
            Query(f"{_R}prediction_bias_ratio", "{{kind}}"),)),
        Panel(title="Blocks in the prefix index", unit="short", queries=(Query(f"{_R}index_blocks", "{{state}}"),)),
    )),
)  # fmt: skip

RULES = (
    Rule(name="TollbridgeNoWorker", expr=f"sum({_R}worker_ready) == 0", hold="30s", severity="critical",
         summary="No worker is ready: every request is refused.",
         action="Look at the workers' logs; /health says what each one's last check found."),
    Rule(name="TollbridgeDiscoveryBlind", expr=f"{_R}discovery_up == 0", hold="5m", severity="warning",
         summary="The router cannot see who serves; what it knew last stands.",
         action="The router's log says why; `tollbridge doctor` examines the rest."),
    Rule(name="TollbridgeWorkerDown", expr=f"{_R}worker_ready == 0", hold="2m", severity="warning",
         summary="Worker {{ $labels.worker }} is not ready.",
         action="Restart it; `tollbridge doctor` examines the rest."),
    Rule(name="TollbridgeNoReadyPrefill",
         expr=f'sum(rate({_R}requests_total{{reason="no_ready_prefill"}}[5m])) > 0', hold="2m", severity="warning",
         summary="No ready prefill worker: everything runs local.",
         action="Look at the prefill workers, and at the secret and KV port that they report (`tollbridge doctor`)."),
    Rule(name="TollbridgeSplitsNotVerified",
         expr=f"sum(rate({_R}split_unverified_total[10m])) / (sum(rate({_R}split_verified_total[10m])) + sum(rate({_R}split_unverified_total[10m]))) > 0.05",
         hold="5m", severity="warning", summary="More than 5 % of the splits pay for prefill twice: their KV does not arrive.",
         action="The reason is in `tollbridge_router_split_unverified_total` and in `/decisions`."),
    Rule(name="TollbridgeSplittingDoesNotPay",
         expr=f"sum(increase({_R}toll_seconds_total[1h])) > 2 * sum(increase({_R}stall_avoided_seconds_total[1h])) and sum(increase({_R}requests_total{{choice=\"split\"}}[1h])) > 100",
         hold="1h", severity="warning", summary="Splits cost more than twice what they spare others.",
         action="Set `router.policy: adaptive`, or look at the link: `tollbridge probe link`."),
    Rule(name="TollbridgeErrors",
         expr=f'sum(rate({_R}requests_total{{outcome="error"}}[5m])) / sum(rate({_R}requests_total[5m])) > 0.02',
         hold="5m", severity="critical", summary="More than 2 % of the requests end in an error.",
         action="`/decisions` has the sentence of each."),
    Rule(name="TollbridgeGoodputLow",
         expr=f"sum(rate({_R}slo_requests_total[10m])) / sum(rate({_R}requests_total[10m])) < 0.9", hold="10m", severity="warning",
         summary="Fewer than 90 % of the requests meet their SLOs.",
         action="Look at the queue, at TTFT by path, and at the gaps between tokens of each worker."),
    Rule(name="TollbridgeQueueing", expr=f"sum({_R}waiting_requests) > 0", hold="5m", severity="warning",
         summary="Requests have been waiting for a place for five minutes.",
         action="Add workers, or raise `router.max_concurrent` if the workers have room."),
    Rule(name="TollbridgeKvCacheFull", expr="vllm:kv_cache_usage_perc > 0.95", hold="10m", severity="warning",
         summary="The KV cache of {{ $labels.instance }} is full: requests wait there for room.",
         action="Send less there, or give it more KV cache."),
    Rule(name="TollbridgePinnedBound", expr="tollbridge:pinned_blocks >= (tollbridge:max_pinned_blocks > 0)", hold="2m",
         severity="warning", summary="{{ $labels.instance }} holds as much unfetched KV as it may: no new splits with it.",
         action="The decode workers or the link are too slow for it."),
    Rule(name="TollbridgePredictionsOff", expr=f'abs({_R}prediction_bias_ratio{{kind="ttft"}}) > 0.5', hold="15m", severity="warning",
         summary="Predicted first tokens are off by more than half on average.",
         action="The link or an engine has changed: `tollbridge probe`, or wait until the model has learnt it."),
)  # fmt: skip
