"""What the engine counts, from start."""

from __future__ import annotations

from dataclasses import dataclass

from tollbridge.engine.requests import LiveRequest


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since start; tokens unless the name says otherwise."""

    steps: int = 0
    generated: int = 0
    local_compute: int = 0  # prompt tokens by where their KV came from, counted at the first sampled token
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    cache_queries: int = 0  # counted at the first admission
    cache_hits: int = 0

    def admitted(self, live: LiveRequest) -> None:
        """Count a request's first look into the prefix cache."""
        self.cache_queries += live.sequence.num_prompt_tokens
        self.cache_hits += live.cached_tokens

    def prefilled(self, live: LiveRequest) -> None:
        """Count a request's prompt, which is now complete."""
        self.local_cache_hit += live.cached_tokens
        self.external_kv_transfer += live.loaded_tokens
        self.local_compute += live.prompt_computed

    @property
    def prompt(self) -> int:
        return self.local_compute + self.local_cache_hit + self.external_kv_transfer

    def by_source(self) -> dict[str, int]:
        """Return prompt tokens under the names that the metrics use."""
        return {
            "local_compute": self.local_compute,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": self.external_kv_transfer,
        }
