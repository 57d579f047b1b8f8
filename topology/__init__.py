"""Machines, their links and the paths between GPUs. Needs neither torch nor a GPU."""

from linkweave.topology.bounds import Bound, allreduce_bound, bound, reducing_bound
from linkweave.topology.checks import CollectiveError, TopologyError
from linkweave.topology.clusters import cluster
from linkweave.topology.compare import compare
from linkweave.topology.draw import draw, svg
from linkweave.topology.graph import GpuId, Link, Vertex
from linkweave.topology.loading import load
from linkweave.topology.machines import NAMES
from linkweave.topology.readers.nccl_write import to_nccl_xml
from linkweave.topology.topology import Topology

__all__ = [
    "NAMES",
    "Bound",
    "CollectiveError",
    "GpuId",
    "Link",
    "Topology",
    "TopologyError",
    "Vertex",
    "allreduce_bound",
    "bound",
    "cluster",
    "compare",
    "draw",
    "load",
    "reducing_bound",
    "to_nccl_xml",
]

setattr(Topology, "_repr_svg_", svg)  # noqa: B010 - for notebooks; `draw` is made of Topologies
