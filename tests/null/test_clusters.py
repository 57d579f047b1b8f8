"""Several nodes on one network: names, numbers, rails and leaves; bounds of small ones by hand."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from linkweave.topology import Topology, TopologyError, Vertex, bound, load
from linkweave.topology.clusters import cluster, looks_like_cluster
from tests.null.helpers import GB, both


def neighbours(topology: Topology, vertex: Vertex) -> set[Vertex]:
    return {k.dst for k in topology.links if k.src == vertex}


def uplinks(topology: Topology) -> dict[str, int]:
    """Leaf switches and what they send to the spine; the same comes back."""
    up = {str(k.src): k.bandwidth for k in topology.links if k.dst == "spine"}
    down = {str(k.dst): k.bandwidth for k in topology.links if k.src == "spine"}
    assert up == down
    return up


def algbw(topology: Topology, collective: str = "allreduce") -> Fraction:
    return 1 / bound(topology, collective).seconds_per_byte


# ---- what is built ---------------------------------------------------------------------------


def test_four_dgx1() -> None:
    text = "4 x dgx1-v100 nics=rail nic=12.5GB/s"
    topo, dgx1 = load(text), load("dgx1-v100")
    assert (topo.name, topo.gpus) == (text, tuple(range(32)))
    assert topo.assumptions == dgx1.assumptions
    kinds = Counter(k.kind for k in topo.links)
    # of a node: 16 pairs of NVLinks, 8 GPUs' ports and 4 NICs, 4 uplinks, one link between CPUs
    assert kinds == {
        k: 4 * 2 * n
        for k, n in {"nvlink": 16, "pcie": 8 + 4, "host": 4, "socket": 1, "network": 4}.items()
    }
    assert {v for v in topo.switches if v.startswith("node2.")} == {
        *(f"node2.switch{s}" for s in range(4)), "node2.cpu0", "node2.cpu1",
        *(f"node2.nic{n}" for n in range(4)),
    }  # fmt: skip
    assert {v for v in topo.switches if "." not in v} == {f"rail{r}" for r in range(4)}
    for r in range(4):
        assert neighbours(topo, f"rail{r}") == {f"node{i}.nic{r}" for i in range(4)}
        assert neighbours(topo, f"node1.nic{r}") == {f"rail{r}", f"node1.switch{r}"}
    nic = topo.by_ends["node3.nic2", "rail2"]
    assert (nic.bandwidth, nic.count, nic.latency_us, nic.kind) == (12_500_000_000, 1, 5, "network")
    assert topo.by_ends["node3.switch2", "node3.nic2"].bandwidth == 12_500_000_000
    for i in range(4):
        for link in dgx1.links:
            ends = [8 * i + v if isinstance(v, int) else f"node{i}.{v}" for v in
                    (link.src, link.dst)]  # fmt: skip
            assert topo.by_ends[ends[0], ends[1]] == replace(link, src=ends[0], dst=ends[1])


def test_numbers_follow_the_order_of_the_node() -> None:
    some = load("dgx1-v100").subset([6, 2, 1])
    topo = cluster(some, 2, name="pair")
    assert (topo.name, topo.gpus) == ("pair", (0, 1, 2, 3, 4, 5))
    nvlinks = {(k.src, k.dst): k.count for k in topo.links if k.kind == "nvlink"}
    # 6-2 has one link, 2-1 two, 6-1 none
    assert nvlinks == {(0, 1): 1, (1, 0): 1, (1, 2): 2, (2, 1): 2,
                       (3, 4): 1, (4, 3): 1, (4, 5): 2, (5, 4): 2}  # fmt: skip
    assert "node1.switch3" in neighbours(topo, 3)
    assert cluster(some, 2).name == "2 x dgx1-v100[6,2,1]"


@pytest.mark.parametrize(
    ("machine", "hosts", "nic"),
    [
        ("dgx-h100", [0, 1, 2, 3, 4, 5, 6, 7], 48),  # PCIe is not told: a NIC at each GPU
        ("mesh-3", [0, 1, 2], 24),
        ("pcie-5", ["node0.switch0", "node0.switch1"], 24),
        ("dgx1-p100", [f"node0.switch{s}" for s in range(4)], 12),
    ],
)
def test_where_the_nics_of_a_node_are(machine: str, hosts: list[Vertex], nic: int) -> None:
    topo = load(f"2 x {machine}")
    for r, host in enumerate(hosts):
        assert neighbours(topo, f"node0.nic{r}") == {host, f"rail{r}"}
    assert f"rail{len(hosts)}" not in topo.switches
    assert {k.bandwidth for k in topo.links if k.kind == "network"} == {nic * GB}


def test_a_gpu_under_a_cpu_has_its_own_nic() -> None:
    links = (*both(0, "cpu0", 12 * GB, kind="host"), *both(1, "cpu0", 12 * GB, kind="host"))
    topo = cluster(Topology("bare", (0, 1), links), 2)
    assert neighbours(topo, "node1.nic0") == {2, "rail0"}
    assert neighbours(topo, "node1.nic1") == {3, "rail1"}


@pytest.mark.parametrize(
    ("machine", "host"),
    [("dgx1-v100", "node1.cpu0"), ("pcie-8", "node1.host"), ("pcie-4", "node1.switch0"),
     ("mesh-3", "node1.host"), ("dgx2", "node1.host")],
)  # fmt: skip
def test_one_nic_a_node(machine: str, host: str) -> None:
    topo = load(f"3 x {machine} nics=1 nic=10GB/s")
    assert neighbours(topo, "net") == {f"node{i}.nic0" for i in range(3)}
    assert neighbours(topo, "node1.nic0") == {host, "net"}
    assert not [v for v in topo.switches if "rail" in v or "nic1" in v]
    assert topo.by_ends["node1.nic0", "net"].bandwidth == 10 * GB
    size = len(load(machine).gpus)
    if machine in ("mesh-3", "dgx2"):  # nothing else leads from the GPUs to the host
        assert neighbours(topo, host) == {*range(size, 2 * size), "node1.nic0"}


# ---- leaves ----------------------------------------------------------------------------------

LEAVES = [  # 6 nodes with two NICs of 10 GB/s: what 4 and 2 of them send, divided
    ("leaf=4", 40 * GB, 20 * GB),
    ("leaf=4 oversubscription=1", 40 * GB, 20 * GB),
    ("leaf=4 oversubscription=2", 20 * GB, 10 * GB),
    ("leaf=4 oversubscription=3:1", 13_333_333_333, 6_666_666_666),
    ("leaf=4 oversubscription=3", 13_333_333_333, 6_666_666_666),
    ("leaf=4 oversubscription=3/2", 26_666_666_666, 13_333_333_333),
    ("leaf=4 oversubscription=1:2", 80 * GB, 40 * GB),
]


@pytest.mark.parametrize(("words", "full", "partial"), LEAVES)
def test_leaves_and_spine(words: str, full: int, partial: int) -> None:
    topo = load(f"6 x mesh-2 nic=10GB/s {words}")
    assert uplinks(topo) == {
        "rail0.leaf0": full, "rail0.leaf1": partial, "rail1.leaf0": full, "rail1.leaf1": partial
    }  # fmt: skip
    for r in (0, 1):
        first = {f"node{i}.nic{r}" for i in range(4)}
        assert neighbours(topo, f"rail{r}.leaf0") == first | {"spine"}
        last = {f"node{i}.nic{r}" for i in (4, 5)}
        assert neighbours(topo, f"rail{r}.leaf1") == last | {"spine"}


def test_leaves_of_one_network() -> None:
    topo = load("5 x mesh-2 nics=1 nic=10GB/s leaf=2")
    assert uplinks(topo) == {"net.leaf0": 20 * GB, "net.leaf1": 20 * GB, "net.leaf2": 10 * GB}
    single = load("3 x mesh-2 nics=1 nic=10GB/s leaf=1")
    assert uplinks(single) == {f"net.leaf{i}": 10 * GB for i in range(3)}


@pytest.mark.parametrize("leaf", [3, 4, 999999])
def test_a_leaf_for_all_needs_no_spine(leaf: int) -> None:
    topo = load(f"3 x mesh-2 leaf={leaf} oversubscription=2")
    assert "spine" not in topo.switches
    assert topo.links == load("3 x mesh-2").links


# ---- NICs that the machine's own file tells --------------------------------------------------


def told() -> Topology:
    links = (
        *load("mesh-2").links, *both(0, "switch0", 12 * GB, kind="pcie"),
        *both(1, "switch0", 12 * GB, kind="pcie"),
        *both("mlx5_0", "switch0", 11 * GB, kind="network"),
        *both("mlx5_1", "switch0", 7 * GB, kind="network"),
    )  # fmt: skip
    return Topology("told", (0, 1), links, ("something was assumed",))


def test_told_nics_are_as_fast_as_told(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    path.write_text(told().to_json())
    topo = load(f"4 x {path} nic=99GB/s leaf=3 oversubscription=2")
    assert topo.assumptions == ("something was assumed",)
    assert uplinks(topo) == {
        "rail0.leaf0": 33 * GB // 2, "rail0.leaf1": 11 * GB // 2,
        "rail1.leaf0": 21 * GB // 2, "rail1.leaf1": 7 * GB // 2,
    }  # fmt: skip
    assert topo.by_ends["node2.mlx5_1", "rail1.leaf0"].bandwidth == 7 * GB
    assert neighbours(topo, "node2.mlx5_1") == {"node2.switch0", "rail1.leaf0"}
    assert not [v for v in topo.switches if ".nic" in v]
    assert algbw(cluster(told(), 2)) == 18 * GB


def test_one_of_the_told_nics() -> None:
    topo = cluster(told(), 2, nics="1")
    assert neighbours(topo, "net") == {"node0.mlx5_0", "node1.mlx5_0"}
    assert not [v for v in topo.switches if "mlx5_1" in v]
    assert algbw(topo) == 11 * GB


# ---- bounds by hand --------------------------------------------------------------------------

F = Fraction
BY_HAND = [
    # a node sends 20: 2 * 20 / 2. All apart: 4 * 35 / 6
    ("2 x mesh-2 nic=10GB/s", F(20)),
    ("2 x mesh-2 nic=10GB/s nics=1", F(10)),
    # four nodes: 4 * 20 / 6
    ("4 x mesh-2 nic=10GB/s", F(40, 3)),
    ("4 x mesh-2 nic=10GB/s leaf=2", F(40, 3)),
    # two halves, each behind two uplinks of 10: 20; still the nodes
    ("4 x mesh-2 nic=10GB/s leaf=2 oversubscription=2", F(40, 3)),
    # behind two of 5: 10
    ("4 x mesh-2 nic=10GB/s leaf=2 oversubscription=4", F(10)),
    # three nodes, leaves of two and one: 40 and 20 sent, a fifth of that led up.
    # {0, 1}, {2}: the lesser of 8 and 4
    ("3 x mesh-2 nic=10GB/s leaf=2 oversubscription=5", F(4)),
    # one NIC of 12 at each CPU 0: 3 * 12 / 4
    ("3 x dgx1-v100 nics=1 nic=12GB/s", F(9)),
    # four NICs of 1: 2 * 4 / 2
    ("2 x dgx1-v100 nic=1GB/s", F(4)),
    # four NICs of 12, one at each PCIe switch. A node sends 48; all apart 16 * (150 + 6) / 30
    ("2 x dgx1-v100", F(48)),
    # of 24: a node sends 96; all apart 16 * (150 + 12) / 30
    ("2 x dgx1-v100 nic=24GB/s", F(432, 5)),
    # a NIC of 48 at each GPU: a node sends 384; all apart 16 * (450 + 48) / 30
    ("2 x dgx-h100", F(1328, 5)),
    # of 24: a node sends 192; all apart 16 * (450 + 24) / 30 = 252.8
    ("2 x dgx-h100 nic=24GB/s", F(192)),
    # 8 GPUs on ports of 12, all apart 8 * 12 / 14; a node's one NIC: 24
    ("2 x pcie-4", F(48, 7)),
    # 2 * 4 GPUs on ports of 12, one NIC of 2 a node
    ("2 x pcie-4 nic=2GB/s", F(2)),
]


@pytest.mark.parametrize(("spec", "value"), BY_HAND)
def test_bounds_by_hand(spec: str, value: Fraction) -> None:
    assert algbw(load(spec)) == value * GB


def test_an_odd_uplink_is_rounded_down() -> None:
    # two halves behind two uplinks of floor(20 / 3) GB/s, just less than four nodes' 40 / 3
    assert algbw(load("4 x mesh-2 nic=10GB/s leaf=2 oversubscription=3")) == 2 * 6_666_666_666


def test_other_collectives_of_a_cluster() -> None:
    topo = load("4 x mesh-2 nic=10GB/s")  # a node receives 20 GB/s: 8 * 20 / 6
    assert algbw(topo, "allgather") == algbw(topo, "reduce_scatter") == F(80 * GB, 3)
    assert algbw(topo, "broadcast") == 20 * GB
    assert bound(topo).bottleneck == "the two links of each of 4 groups: 0-1, 2-3, 4-5 and 6-7"


# ---- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["dgx1-v100", "mesh-3", "dgx2", "pcie-5"])
@pytest.mark.parametrize("words", ["", " nics=1", " leaf=1"])
def test_one_node_is_the_machine(machine: str, words: str) -> None:
    topo = load(f"1 x {machine}{words}")
    assert topo.gpus == load(machine).gpus
    assert not [k for k in topo.links if k.kind == "network"]
    assert topo.isomorphic_to(load(machine)) is not None
    assert algbw(topo) == algbw(load(machine))


@pytest.mark.parametrize("spec", ["4096 x mesh-1", "512 x dgx1-v100 leaf=32", "2 x pcie-2048"])
def test_4096_gpus(spec: str) -> None:
    assert load(spec).gpus == tuple(range(4096))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("4097 x mesh-1", "4097 nodes of mesh-1 with 1 GPUs each: from 1 node to 4096 GPUs"),
        ("513 x dgx1-v100", "513 nodes of dgx1-v100 with 8 GPUs each"),
        ("999999 x dgx2", "999999 nodes of dgx2 with 16 GPUs each"),
        ("0 x mesh-2", "0 nodes of mesh-2"),
    ],
)
def test_too_many_or_none(spec: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        load(spec)


def test_nodes_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("# a file\n2 x mesh-2\n")
    assert len(load(path).gpus) == 4
    with pytest.raises(TopologyError, match=r"two\.txt: a cluster cannot be the node of a cluster"):
        load(f"2 x {path}")
    path.write_text(f"2 x {path}")  # names itself
    with pytest.raises(TopologyError, match="a cluster cannot be the node of a cluster"):
        load(path)
    with pytest.raises(TopologyError, match="2 x mesh-2 cannot be a node: its GPUs share"):
        cluster(load("2 x mesh-2"), 2)
    with pytest.raises(TopologyError, match="cpu-4 cannot be a node: its GPUs share memory or a"):
        load("2 x cpu-4")
    with pytest.raises(TopologyError):
        load("2 x 2 x mesh-2")
    as_json = tmp_path / "two.json"
    as_json.write_text(load("2 x mesh-2").to_json())
    with pytest.raises(TopologyError, match="2 x mesh-2 cannot be a node"):
        load(f"2 x {as_json}")
    with pytest.raises(TopologyError, match="cannot be a node: it has forwarders without a rank"):
        cluster(load("dgx1-v100").subset([0, 5], [1]), 2)


# ---- words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "4 x mesh-2 nic=12.5GB/s leaf=2 oversubscription=2",
        "4 x mesh-2 nic=100Gb/s leaf=2 oversubscription=2:1",
        "4x mesh-2 nic=100Gbit/s leaf=2 oversubscription=2/1",
        "4 * mesh-2 nics=rail oversubscription=4/2 leaf=2 nic=12.500GB/s latency=5us",
        "4 X  mesh-2   nic=12.5GB/s  latency=5.0us  leaf=2  oversubscription=02",
        "4 x mesh-2\n nic=12.5GB/s\n leaf=2 oversubscription=2",
        "# two racks\n\n4 x mesh-2  # mesh\nnic=12.5GB/s #leaf=9\n leaf=2 oversubscription=2\n",
        "4 x\nmesh-2 nic=12.5GB/s\r\nleaf=2\toversubscription=2",
    ],
)
def test_words_that_mean_the_same(text: str, tmp_path: Path) -> None:
    usual = load("4 x mesh-2 nics=rail nic=12.5GB/s leaf=2 oversubscription=2 latency=5us")
    assert looks_like_cluster(text)
    assert load(text).links == usual.links
    path = tmp_path / "racks.txt"
    path.write_text(text)
    made = load(path)
    assert (made.name, made.links) == ("racks", usual.links)


@pytest.mark.parametrize(
    ("rate", "bandwidth"),
    [("25GB/s", 25 * GB), ("200Gb/s", 25 * GB), ("200Gbit/s", 25 * GB), ("0.5GB/s", GB // 2),
     ("1Gb/s", GB // 8), ("12.000001GB/s", 12_000_001_000), ("0.000001GB/s", 1000)],
)  # fmt: skip
def test_rates(rate: str, bandwidth: int) -> None:
    topo = load(f"2 x mesh-2 nic={rate}")
    assert topo.by_ends["rail0", "node1.nic0"].bandwidth == bandwidth


@pytest.mark.parametrize(("words", "us"), [("", 5), (" latency=2.5us", 2.5), (" latency=0us", 0)])
def test_latency_of_the_network(words: str, us: float) -> None:
    topo = load(f"4 x mesh-2 leaf=2{words}")
    for link in topo.links:
        on_it = link.kind == "network" or any("nic" in str(v) for v in (link.src, link.dst))
        assert link.latency_us == (us if on_it else 5)


BAD_WORDS = [
    ("colour=3", "'colour=3' in a cluster's description; known are nics=, nic=, leaf=, oversub"),
    ("rail", "'rail' in a cluster's description"),
    ("=3", "'=3' in a cluster's description"),
    ("nics = rail", "'nics' in a cluster's description"),
    ("NIC=3GB/s", "'NIC=3GB/s' in a cluster's"),
    ("leaf=2 nic=3GB/s leaf=2", "leaf= is given twice"),
    ("nics=1 nics=rail", "nics= is given twice"),
    ("nics=2", "nics='2': choose"),
    ("nics=", "nics='': choose"),
    ("nic=12", "nic='12': a rate is like 25GB/s or 200Gb/s"),
    ("nic=0GB/s", "nic='0GB/s': a rate"),
    ("nic=0.0Gb/s", "nic='0.0Gb/s': a rate"),
    ("nic=-1GB/s", "nic='-1GB/s': a rate"),
    ("nic=12MB/s", "nic='12MB/s': a rate"),
    ("nic=1e3GB/s", "nic='1e3GB/s': a rate"),
    ("nic=nanGB/s", "nic='nanGB/s': a rate"),
    ("nic=1234567GB/s", "nic='1234567GB/s': a rate"),
    ("leaf=x", "leaf='x': must be a number of nodes"),
    ("leaf=-1", "leaf='-1': must be a number of nodes"),
    ("leaf=1.5", "leaf='1.5': must be a number of nodes"),
    ("leaf=0", "leaf 0 and oversubscription 1 must be positive"),
    ("oversubscription=0", "oversubscription='0': a ratio is like 2, 3:1 or 3/2"),
    ("oversubscription=1:0", "oversubscription='1:0': a ratio"),
    ("oversubscription=0:1", "oversubscription='0:1': a ratio"),
    ("oversubscription=2:", "oversubscription='2:': a ratio"),
    ("oversubscription=1.5", "oversubscription='1.5': a ratio"),
    ("oversubscription=-2", "oversubscription='-2': a ratio"),
    ("latency=5", "latency='5': must be like 5us"),
    ("latency=5ms", "latency='5ms': must be like 5us"),
    ("latency=-1us", "latency='-1us': must be like 5us"),
    ("latency=infus", "latency='infus': must be like 5us"),
]


@pytest.mark.parametrize(("words", "told"), BAD_WORDS)
def test_words_that_are_refused(words: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=re.escape(told)):
        load(f"2 x mesh-2 {words}")
    path = tmp_path / "racks.txt"
    path.write_text(f"2 x mesh-2\n{words}")
    where = "" if told.startswith(("nics='", "leaf 0")) else f"{path}: "
    with pytest.raises(TopologyError, match=re.escape(where + told)):
        load(path)


@pytest.mark.parametrize("spec", ["2 x nothing", "2 x mesh-0", "2 x", "x mesh-2", "-2 x mesh-2",
                                  "1234567 x mesh-2", "two x mesh-2", "2 x /no/such"])  # fmt: skip
def test_no_such_cluster(spec: str) -> None:
    with pytest.raises(TopologyError):
        load(spec)


@pytest.mark.parametrize(
    "arguments",
    [{"nics": "2"}, {"nic": 0}, {"nic": -5}, {"leaf": 0}, {"oversubscription": 0},
     {"oversubscription": Fraction(-1, 2)}, {"latency_us": -1}],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_refused(arguments: dict) -> None:
    with pytest.raises(TopologyError):
        cluster(load("mesh-2"), 2, **arguments)


def test_json_gives_the_cluster_back() -> None:
    for spec in ("3 x dgx1-v100 leaf=2 oversubscription=3/2", "2 x mesh-2 nics=1"):
        assert load(load(spec).to_json()) == load(spec)
