"""What the router knows of prefixes, as Prometheus families, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tollbridge.router.index import IndexFeeder
from tollbridge.router.tokens import Tokens

_PREFIX = "tollbridge_router_"


class KnowledgeCollector(Collector):
    """Reads the statistics of the index, of the listeners and of the tokenizer at each scrape."""

    def __init__(self, feeder: IndexFeeder, tokens: Tokens) -> None:
        self._feeder = feeder
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        now = self._feeder.index.statistics()
        sizes = {"held": now.num_held, "expected": now.num_expected, "distinct": now.num_distinct}
        yield _family(GaugeMetricFamily, "index_blocks", "Blocks in the prefix index.", "state", sizes)
        changes = {
            "stored": now.stored_total,
            "removed": now.removed_total,
            "orphan": now.orphans_total,
            "stray": now.strays_total,
            "unusable": now.unusable_total,
            "forgotten": now.forgotten_total,
            "expired": now.expired_total,
        }
        yield _family(CounterMetricFamily, "index_changes", "Blocks by what became of them.", "change", changes)
        yield from self._listeners()
        yield from self._tokenizing()

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def _listeners(self) -> Iterator[Metric]:
        told = {name: following.statistics for name, following in self._feeder.following.items()}
        listens = {name: float(following.listens) for name, following in self._feeder.following.items()}
        yield _family(GaugeMetricFamily, "follows_kv_events", "1 while KV events are listened to.", "worker", listens)
        for name, what in (
            ("batches", "Batches of KV events taken."),
            ("events", "KV events taken."),
            ("gaps", "Times that batches were missing."),
            ("replays", "Replays asked for."),
            ("lost", "Gaps that a replay did not close: what was known was dropped."),
            ("restarts", "Times that a publisher began anew."),
            ("unreadable", "Batches and events that could not be read."),
        ):
            values = {worker: float(getattr(each, f"{name}_total")) for worker, each in told.items()}
            yield _family(CounterMetricFamily, f"kv_{name}", what, "worker", values)

    def _tokenizing(self) -> Iterator[Metric]:
        now = self._tokens.statistics()
        ways = {
            "remembered": now.hits_total,
            "new": now.misses_total,
            "asked": now.asked_total,
            "failed": now.failed_total,
        }
        yield _family(CounterMetricFamily, "tokenized_prompts", "Prompts by how their tokens were found.", "way", ways)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    what: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(_PREFIX + name, what, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
