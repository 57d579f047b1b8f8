"""What is wired: machines, links and the ways between GPUs. Needs neither torch nor a GPU."""

from topology.bounds import Bound, allreduce_bound, bound
from topology.clusters import cluster
from topology.compare import compare
from topology.draw import draw
from topology.errors import CollectiveError, TopologyError
from topology.graph import Device, Link, Topology
from topology.loading import load
from topology.machines import NAMES
from topology.nccl_write import to_nccl_xml
from topology.routes import Vertex

__all__ = [
    "NAMES",
    "Bound",
    "CollectiveError",
    "Device",
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
    "to_nccl_xml",
]
