"""What `linkweave topo` prints about a machine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from linkweave.collectives import Explanation
from linkweave.topology import Topology, bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.compare import compare, in_words
from linkweave.topology.errors import TopologyError
from linkweave.topology.text import link_table


def report(machine: Topology) -> str:
    """The matrix, the links, and the bounds with their bottlenecks."""
    lines = [str(machine), "", "links:", *(f"  {line}" for line in link_table(machine) or ["none"])]
    fabric = len(machine.fabric)
    if fabric < len(machine.links):
        lines.append(f"plans and bounds use {fabric} of the {len(machine.links)} directed links")
    return "\n".join([*lines, "", *bounds(machine)])


def bounds(machine: Topology) -> list[str]:
    """The bound of each collective, or why there is none."""
    try:
        return [str(bound(machine, collective)) for collective in BOUNDED]
    except TopologyError as error:
        return [f"no bound: {error}"]


def comparison(one: Topology, other: Topology) -> str:
    """Say whether two machines are wired alike, under which numbers, and what differs."""
    mapping, differences = compare(one, other)
    if mapping is None:
        return "\n".join([f"{one.name} and {other.name} are wired differently:", *differences])
    lines = [f"{one.name} is isomorphic to {other.name}, {in_words(mapping)}"]
    if differences:
        lines += ["what collectives leave out differs:", *differences]
    return "\n".join(lines)


def explanation_json(told: Explanation) -> str:
    """The comparison as JSON: bytes, seconds, and shares of the bound."""
    rows = [{**asdict(row), "busiest": row.busiest and [*row.busiest]} for row in told.rows]
    return json.dumps({
        "topology": told.topology, "size": told.nbytes, "auto": told.choice,
        "reason": told.reason, "bound": told.bound.algbw, "bottleneck": told.bottleneck,
        "rows": rows, "refused": dict(told.refused), "crossovers": told.crossovers,
        "sparse": [{**asdict(row), "seconds": row.seconds if math.isfinite(row.seconds) else None}
                   for row in told.sparse],
    })  # fmt: skip
