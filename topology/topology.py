"""`Topology`: a machine as one immutable value."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from linkweave.topology.checks import TopologyError, read_format, records
from linkweave.topology.graph import GpuId, Graph, Link
from linkweave.topology.symmetry import mappings
from linkweave.topology.text import describe, summary
from linkweave.topology.timings import Timing

_FORMAT = "linkweave-topology"


@dataclass(frozen=True, eq=False)  # compared and hashed as a Graph
class Topology(Graph):
    """A machine: a `Graph` that can be described, saved as JSON, cut down and compared."""

    def subset(self, gpus: Iterable[int], forwarders: Iterable[int] = ()) -> Topology:
        """Return the same machine with only these GPUs; rank r is the r-th of them.

        Traffic may also pass through `forwarders`, which have no rank. Raises TopologyError if the
        machine lacks one of them.
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
        return Topology(name, chosen, links, self.assumptions, devices, helpers, (), self.reducing)

    def isomorphic_to(self, other: Topology) -> dict[int, int] | None:
        """Return a renumbering of this machine's GPUs that turns it into `other`, or None.

        Only fabrics are compared: links must agree in kind, count and bandwidth. Names, latencies
        and numbers may differ, and so may PCIe where NVLinks connect all GPUs.
        """
        mapping = next(mappings(self, other), None)
        return None if mapping is None else dict(mapping)

    def to_json(self) -> str:
        """Return JSON that `topology.load` reads back; equal machines give equal text."""
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
                "reducing": list(self.reducing),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str, where: str = "topology JSON") -> Topology:
        """Read what `to_json` wrote. Raises TopologyError that says where the text is malformed."""
        data = read_format(text, _FORMAT, where)
        for key, kind in {"name": str, "gpus": list}.items():
            if not isinstance(data.get(key), kind):
                raise TopologyError(f'{where}: "{key}" must be a {kind.__name__}')
        for key in ("assumptions", "forwarders", "reducing"):
            if not isinstance(data.setdefault(key, []), list):
                raise TopologyError(f'{where}: "{key}" must be a list')
        links = records(Link, data.get("links"), f"{where}: links")
        ends = {end for link in links for end in (link.src, link.dst)}
        if strange := [switch for switch in data["reducing"] if switch not in ends]:
            raise TopologyError(f"{where}: no link of {strange[0]!r}, which is said to reduce")
        return Topology(
            data["name"], tuple(data["gpus"]), links,
            tuple(map(str, data["assumptions"])),
            records(GpuId, data.get("devices", []), f"{where}: devices"),
            tuple(data["forwarders"]),
            records(Timing, data.get("timings", []), f"{where}: timings"),
            tuple(map(str, data["reducing"])),
        )  # fmt: skip

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        """A line; `print` shows the links and bounds."""
        return f"<Topology {summary(self)}>"
