"""Shares against hand calculations, and the recursion of layer-wise transfers under changing rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.cost.toll import last_arrival_s
from tollbridge.sim.agenda import Agenda
from tollbridge.sim.network import Flow, Network, fair_shares


def never() -> bool:
    return False


class Bench:
    """A network whose flows note when they end."""

    def __init__(self, **capacities: float) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda, capacities)
        self.ends: dict[str, float] = {}

    def send(
        self,
        name: str,
        path: tuple[str, ...],
        pieces: list[tuple[float, float]],
        *,
        at_s: float = 0.0,
        line: object = None,
    ) -> None:
        """Open a flow at `at_s` with pieces (computed at, bytes of this piece)."""

        def start() -> None:
            total, cumulated = 0.0, []
            for time_s, size in pieces:
                total += size
                cumulated.append((time_s, total))
            flow = self.network.open(path, total, lambda: self.ends.__setitem__(name, self.agenda.now_s), line=line)
            self.network.supply(flow, cumulated)
            self.network.check()

        self.agenda.at(at_s, start)

    def run(self) -> dict[str, float]:
        self.agenda.run(until=never)
        return self.ends


def flow(*path: str) -> Flow:
    return Flow(path, 1.0, lambda: None, 0.0)


def test_max_min_shares_of_the_textbook() -> None:
    """Three flows over links of 10 and 4: the two on the narrow one get 2 each, the third what is left of the wide."""
    a, b, c = flow("wide"), flow("wide", "narrow"), flow("narrow")
    shares = fair_shares([a, b, c], {"wide": 10.0, "narrow": 4.0})
    assert [shares[each] for each in (a, b, c)] == [8.0, 2.0, 2.0]


def test_a_switch_bounds_flows_that_share_no_nic() -> None:
    a, b = flow("out a", "switch", "in c"), flow("out b", "switch", "in d")
    capacities = {"out a": 10.0, "out b": 3.0, "in c": 10.0, "in d": 10.0, "switch": 9.0}
    shares = fair_shares([a, b], capacities)
    assert [shares[a], shares[b]] == [6.0, 3.0]


def test_eight_transfers_take_eight_times_one() -> None:
    one, eight = Bench(out=1e6, into=1e6), Bench(out=1e6, into=1e6)
    one.send("0", ("out", "into"), [(0.0, 5e6)])
    for index in range(8):
        eight.send(str(index), ("out", "into"), [(0.0, 5e6)])
    assert one.run() == {"0": pytest.approx(5.0)}
    assert eight.run() == {str(index): pytest.approx(40.0) for index in range(8)}


def test_who_comes_later_shares_from_then_on() -> None:
    """100 bytes at 10/s; after 4 s another 30 bytes: 40 are gone, both get 5/s, so 30 last 6 s; 30 are left, 3 s."""
    bench = Bench(link=10.0)
    bench.send("first", ("link",), [(0.0, 100.0)])
    bench.send("second", ("link",), [(0.0, 30.0)], at_s=4.0)
    assert bench.run() == {"second": pytest.approx(10.0), "first": pytest.approx(13.0)}


def test_a_flow_that_waits_for_prefill_leaves_its_share_to_others() -> None:
    """The slow one has 10 bytes every 10 s. Its first go at 5/s until 2 s, then the other has all 10/s until 10 s: 10
    + 80 = 90 are gone, and the last 10 take 2 s beside the second piece, which ends at 12 s as well."""
    bench = Bench(link=10.0)
    bench.send("slow", ("link",), [(0.0, 10.0), (10.0, 10.0)])
    bench.send("bulk", ("link",), [(0.0, 100.0)])
    assert bench.run() == {"slow": pytest.approx(12.0), "bulk": pytest.approx(12.0)}


@pytest.mark.parametrize(
    ("size", "ends"),
    [(10.0, {"short": 5.0, "long": 11.0}), (30.0, {"long": 10.0, "short": 13.0})],
    ids=["shorter", "age counts"],
)
def test_on_a_line_the_shortest_remainder_goes_first(size: float, ends: dict[str, float]) -> None:
    """After 4 s 60 of 100 bytes are left, and 4 s of age are worth 40: a newcomer of less than 20 bytes is first."""
    bench = Bench(link=10.0)
    bench.send("long", ("link",), [(0.0, 100.0)], line="pair")
    bench.send("short", ("link",), [(0.0, size)], at_s=4.0, line="pair")
    assert bench.run() == {name: pytest.approx(end_s) for name, end_s in ends.items()}


def test_on_a_line_a_gap_is_used_and_the_first_goes_on_when_it_can() -> None:
    """The short one has 10 bytes at once and 10 at 3 s. The long one gets 2 s between them, and the rest after 4 s."""
    bench = Bench(link=10.0)
    bench.send("short", ("link",), [(0.0, 10.0), (3.0, 10.0)], line="pair")
    bench.send("long", ("link",), [(0.0, 50.0)], line="pair")
    assert bench.run() == {"short": pytest.approx(4.0), "long": pytest.approx(7.0)}


def test_lines_share_whatever_is_on_them() -> None:
    """Two of one line and one of another: 5/s for each line, so 20 bytes end at 4 s, 40 at 8 s, and 20 more at 10 s."""
    bench = Bench(link=10.0)
    bench.send("a", ("link",), [(0.0, 20.0)], line="pair")
    bench.send("b", ("link",), [(0.0, 40.0)], line="pair")
    bench.send("c", ("link",), [(0.0, 40.0)], line="other")
    assert bench.run() == {"a": pytest.approx(4.0), "c": pytest.approx(8.0), "b": pytest.approx(10.0)}


def test_what_is_withdrawn_is_sent_again() -> None:
    bench = Bench(link=10.0)
    network, agenda = bench.network, bench.agenda
    made = network.open(("link",), 100.0, lambda: bench.ends.__setitem__("it", agenda.now_s))
    network.supply(made, [(0.0, 50.0), (20.0, 100.0)])

    def preempt() -> None:
        assert network.withdraw(made) == pytest.approx(30.0)
        network.supply(made, [(10.0, 100.0)])

    agenda.at(3.0, preempt)
    assert bench.run() == {"it": pytest.approx(17.0)}
    assert network.bytes_carried == pytest.approx(100.0)


PIECES = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(1.0, 1e4)), min_size=1, max_size=30)


@given(gaps=PIECES, rate=st.floats(10.0, 1e5))
def test_alone_a_flow_ends_as_the_recursion_says(gaps: list[tuple[float, float]], rate: float) -> None:
    now_s, pieces = 0.0, []
    for gap_s, size in gaps:
        now_s += gap_s
        pieces.append((now_s, size))
    bench = Bench(link=rate)
    bench.send("it", ("link",), pieces)
    assert bench.run()["it"] == pytest.approx(last_arrival_s(pieces, rate), rel=1e-6, abs=1e-6)


@given(flows=st.lists(st.tuples(st.floats(0.0, 5.0), PIECES), min_size=2, max_size=6), num_lines=st.integers(1, 6))
def test_a_shared_link_is_never_idle_while_somebody_has_bytes(
    flows: list[tuple[float, list[tuple[float, float]]]], num_lines: int
) -> None:
    """Whatever the shares: the last end is that of one flow that has everybody's pieces."""
    bench, everything = Bench(link=1000.0), []
    for index, (at_s, gaps) in enumerate(flows):
        now_s, pieces = at_s, []
        for gap_s, size in gaps:
            now_s += gap_s
            pieces.append((now_s, size))
        bench.send(str(index), ("link",), pieces, at_s=at_s, line=index % num_lines)
        everything += pieces
    ends = bench.run()
    assert len(ends) == len(flows)
    assert max(ends.values()) == pytest.approx(last_arrival_s(sorted(everything), 1000.0), rel=1e-6, abs=1e-5)
