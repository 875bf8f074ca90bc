"""Which worker is on which host, and which links a transfer between two hosts crosses."""

from __future__ import annotations

from collections.abc import Sequence

from tollbridge.sim.scenario import Scenario


class Topology:
    """Names and capacities of links: NICs in either direction, the bus of a host, switches and what joins them."""

    def __init__(self, scenario: Scenario) -> None:
        self._network = scenario.network
        self.hosts: dict[str, str] = {}  # by worker, in order
        self.prefers: dict[str, str] = {}
        next_host = 0
        for group in scenario.fleet:
            first = next_host if group.first_host is None else group.first_host
            for index in range(group.count):
                name = f"w{len(self.hosts)}"
                self.hosts[name] = f"h{first + index // group.per_host}"
                self.prefers[name] = group.prefer
            next_host = max(next_host, first + -(-group.count // group.per_host))
        self.capacities: dict[str, float] = {}
        for host in dict.fromkeys(self.hosts.values()):
            self._add(host)

    def path(self, source: str, target: str) -> tuple[str, ...]:
        """Return the links from host to host. Within one switch only this switch counts, beyond it both do."""
        if source == target:
            return (f"bus {source}",)
        switches: tuple[str, ...] = ()
        if self._network.switch_bytes_per_s is not None:
            switches = tuple(dict.fromkeys((self._switch(source), self._switch(target))))
        return (f"out {source}", *switches, f"in {target}")

    def goodputs(self, hosts: Sequence[str]) -> dict[tuple[str, str], float]:
        """Return what one transfer alone gets, by pair of these hosts."""
        names = list(dict.fromkeys(hosts))
        pairs = [(source, target) for source in names for target in names]
        return {(a, b): min(self.capacities[link] for link in self.path(a, b)) for a, b in pairs}

    def _add(self, host: str) -> None:
        network = self._network
        self.capacities[f"out {host}"] = self.capacities[f"in {host}"] = network.nic_bytes_per_s
        self.capacities[f"bus {host}"] = network.bus_bytes_per_s
        if network.switch_bytes_per_s is not None:
            self.capacities[self._switch(host)] = network.switch_bytes_per_s

    def _switch(self, host: str) -> str:
        per_switch = self._network.hosts_per_switch
        return f"switch {int(host[1:]) // per_switch}" if per_switch else "switch"
