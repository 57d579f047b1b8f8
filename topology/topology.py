"""`Topology`: a machine as one immutable value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from linkweave.topology.errors import TopologyError
from linkweave.topology.graph import Graph
from linkweave.topology.link import Device, Link
from linkweave.topology.symmetry import mappings
from linkweave.topology.text import describe
from linkweave.topology.timings import timing_rows

_FORMAT = "linkweave-topology"


@dataclass(frozen=True, eq=False)  # compared and hashed as a Graph
class Topology(Graph):
    """A machine: its graph, in words and as JSON, and its symmetries."""

    def subset(self, gpus: Iterable[int], forwarders: Iterable[int] = ()) -> Topology:
        """The same machine with these GPUs only, in this order (rank r is the r-th of them).

        `forwarders` stay as well, without a rank: traffic may pass them.
        """
        chosen, helpers = tuple(gpus), tuple(forwarders)
        known = (*self.gpus, *self.forwarders)
        if missing := [g for g in (*chosen, *helpers) if g not in known]:
            raise TopologyError(f"{self.name} has no GPU {missing[0]}; it has {list(known)}")
        if (chosen, helpers) == (self.gpus, self.forwarders):
            return self
        keep = {*chosen, *helpers}
        links = tuple(
            link
            for link in self.links
            if all(isinstance(end, str) or end in keep for end in (link.src, link.dst))
        )
        name = f"{self.name}[{','.join(map(str, chosen))}]"
        if helpers:
            name += f" over {','.join(map(str, helpers))}"
        devices = tuple(device for device in self.devices if device.gpu in keep)
        return Topology(name, chosen, links, self.assumptions, devices, helpers)

    def isomorphic_to(self, other: Topology) -> dict[int, int] | None:
        """A renumbering of this machine's GPUs that turns it into `other`, or None.

        The fabrics are compared: their links must agree in kind, count and bandwidth. Names,
        latencies, numbering and the host beneath a machine that NVLink connects are free.
        """
        mapping = next(mappings(self, other), None)
        return None if mapping is None else dict(mapping)

    def automorphisms(self) -> Iterator[Mapping[int, int]]:
        """Every renumbering of the GPUs that leaves the fabric as it is, the identity included.

        Lazy: behind a switch of n ports there are n! of them.
        """
        return mappings(self, self)

    def to_json(self) -> str:
        """Stable JSON that `topology.load` reads back to an equal value."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": 1,
                "name": self.name,
                "gpus": list(self.gpus),
                "links": [asdict(link) for link in self.links],
                "assumptions": list(self.assumptions),
                "devices": [asdict(device) for device in self.devices],
                "forwarders": list(self.forwarders),
                "timings": [asdict(timing) for timing in self.timings],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str, where: str = "topology JSON") -> Topology:
        """Read `to_json`'s form. Raises TopologyError naming the place where it is malformed."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(
                f"{where}: line {error.lineno} column {error.colno}: {error.msg}"
            ) from None
        except (ValueError, RecursionError) as error:  # a number, or a nest, of thousands
            raise TopologyError(f"{where}: {error}") from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise TopologyError(f'{where}: needs "format": "{_FORMAT}" at the top')
        if data.get("version") != 1:
            raise TopologyError(f"{where}: version {data.get('version')!r} is unknown; known: 1")
        shape = {"name": str, "gpus": list, "links": list}
        for key, kind in shape.items():
            if not isinstance(data.get(key), kind):
                raise TopologyError(f'{where}: "{key}" must be a {kind.__name__}')
        for key in ("assumptions", "devices", "forwarders", "timings"):
            if not isinstance(data.setdefault(key, []), list):
                raise TopologyError(f'{where}: "{key}" must be a list')
        links, devices = [], []
        for i, entry in enumerate(data["links"]):
            try:
                links.append(Link(**entry))
            except TypeError:
                raise TopologyError(
                    f'{where}: links[{i}] must be an object with "src", "dst", "bandwidth" and '
                    f'optionally "count", "latency_us", "kind"; got {_brief(entry)}'
                ) from None
        for i, entry in enumerate(data["devices"]):
            try:
                devices.append(Device(**entry))
            except TopologyError as error:
                raise TopologyError(f"{where}: devices[{i}]: {error}") from None
            except TypeError:
                raise TopologyError(
                    f'{where}: devices[{i}] must be an object with "gpu" and optionally "bus_id", '
                    f'"uuid", "model", "sm"; got {_brief(entry)}'
                ) from None
        return Topology(
            data["name"], tuple(data["gpus"]), tuple(links), tuple(map(str, data["assumptions"])),
            tuple(devices), tuple(data["forwarders"]), timing_rows(data["timings"], where),
        )  # fmt: skip

    def __str__(self) -> str:
        return describe(self)


def _brief(entry: object) -> str:
    text = repr(entry)
    return text if len(text) <= 200 else f"{text[:200]}..."
