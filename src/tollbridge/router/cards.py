"""The models and adapters of the fleet, read from the workers' cards once: every decision asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Cards = tuple[dict[str, Any], ...]  # of /v1/models


class Named(NamedTuple):
    """The models and the adapters among some cards."""

    models: Cards
    ids: frozenset[str]
    adapters: frozenset[str]

    @classmethod
    def of(cls, models: Cards) -> Named:
        named = [(card.get("id"), card.get("parent")) for card in models]
        ids = frozenset(name for name, _ in named if isinstance(name, str))
        return cls(models, ids, frozenset(name for name, parent in named if isinstance(name, str) and parent))


class Carrier(Protocol):
    """Who has cards."""

    models: Cards

    def named(self) -> Named: ...


Member = TypeVar("Member", bound=Carrier)


class Census(Generic[Member]):
    """Who serves which model. It holds as long as `is_of` says so."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        self._cards = [member.models for member in members]
        self._serving: dict[str | None, list[Member]] = {None: self._members}
        for member in members:
            for name in member.named().ids:
                self._serving.setdefault(name, []).append(member)
        self._adapters = frozenset(name for member in members for name in member.named().adapters)

    def is_of(self, members: Sequence[Member]) -> bool:
        """Return whether they are the same as before, with the same cards."""
        return self._members == members and self._cards == [member.models for member in members]

    def serving(self, model: str | None) -> Sequence[Member]:
        """Return who serves `model`, in their order. None: all of them."""
        return self._serving.get(model, ())

    def is_adapter(self, model: str | None) -> bool:
        return model in self._adapters
