"""What is wired: machines, links and the ways between GPUs. Needs neither torch nor a GPU."""

from topology.draw import draw
from topology.errors import CollectiveError, TopologyError
from topology.graph import Link, Topology, Vertex
from topology.loading import load
from topology.machines import NAMES

__all__ = [
    "NAMES",
    "CollectiveError",
    "Link",
    "Topology",
    "TopologyError",
    "Vertex",
    "draw",
    "load",
]
