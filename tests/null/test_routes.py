"""The ways through links: routes between GPUs, what joins them, the fabric of a machine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from linkweave.topology import Topology, TopologyError, load
from linkweave.topology.graph import between, connects, routes
from tests.null.helpers import Ends, both


def two_way(*pairs: Ends) -> list[Ends]:
    return [e for a, b in pairs for e in ((a, b), (b, a))]


def test_routes_cross_switches_and_no_gpu() -> None:
    ends = two_way((0, "a"), ("a", "b"), ("b", 1), (1, 2), (0, "c"), ("c", 1))
    found = routes(ends, (0, 1, 2))
    assert found == {(0, 1): (0, "c", 1), (1, 0): (1, "c", 0), (1, 2): (1, 2), (2, 1): (2, 1)}
    assert routes(ends, (0, 2)) == {}  # only GPU 1 could pass it on
    assert routes([], (0, 1)) == {}
    assert routes([(0, "a"), ("a", 1)], (0, 1)) == {(0, 1): (0, "a", 1)}


def test_routes_take_the_first_name_of_equals() -> None:
    ends = two_way((0, "z"), ("z", 1), (0, "m"), ("m", 1), (0, "n"), ("n", 1))
    for seed in range(6):
        mixed = random.Random(seed).sample(ends, len(ends))
        assert routes(mixed, (0, 1))[0, 1] == (0, "m", 1)


@pytest.mark.parametrize(
    ("ends", "gpus", "joined"),
    [
        ([], (0,), True),
        ([], (0, 1), False),
        ([(0, 1)], (0, 1), False),
        ([(1, 0)], (0, 1), False),
        (two_way((0, 1)), (0, 1), True),
        (two_way((0, 1), (1, 2)), (0, 2), True),  # over GPU 1
        (two_way((0, "a"), (1, "b")), (0, 1), False),
        (two_way((0, "a"), ("a", "b"), (1, "b")), (0, 1), True),
        ([(0, 1), (1, 2), (2, 0)], (0, 1, 2), True),
        ([(0, 1), (1, 2), (0, 2)], (0, 1, 2), False),
        ([(0, 1), (2, 1), (1, 0)], (0, 1, 2), False),  # none leads into 2
    ],
)
def test_connects(ends: list[Ends], gpus: tuple[int, ...], joined: bool) -> None:
    assert connects(ends, gpus) is joined


def test_between_prunes_dead_ends() -> None:
    core = two_way((0, "s"), (1, "s"), ("s", "host"), ("t", "host"), (2, "t"))
    nics = two_way(("s", "nic0"), ("nic0", "rail"), ("rail", "spine"), ("t", "nic1"))
    assert between(core + nics) == set(core)
    lone = two_way((0, "s"), ("s", "host"), ("host", "nic"))  # all of it leads nowhere
    assert between(lone) == set()
    around = two_way(("a", "b"), ("b", "c"), ("c", "a"), (0, "a"))  # no dead end, a loop
    assert between(around) == set(around)
    assert between(two_way((0, 1), (1, 2))) == set(two_way((0, 1), (1, 2)))
    one_way = [(0, "s"), ("s", 1), ("s", "sink")]
    assert between(one_way) == {(0, "s"), ("s", 1)}


def with_nics(topology: Topology) -> Topology:
    extra = [*both("switch0", "nic0", kind="network"), *both("switch1", "nic1", kind="network")]
    return replace(topology, links=(*topology.links, *extra))


def test_the_fabric_is_nvlink_where_it_connects() -> None:
    dgx1 = load("dgx1-v100")
    assert {k.kind for k in dgx1.links} == {"nvlink", "pcie", "host", "socket"}
    assert {k.kind for k in dgx1.fabric} == {"nvlink"}
    assert len(dgx1.fabric) == 32
    assert {k.kind for k in dgx1.subset([0, 1, 5]).fabric} == {"nvlink"}  # 0 to 5 over GPU 1
    assert {k.kind for k in dgx1.subset([0, 5]).fabric} == {"pcie", "host", "socket"}
    assert {k.kind for k in dgx1.subset([0, 5], [1]).fabric} == {"nvlink"}
    some = dgx1.subset([0, 1, 6])
    assert {k.kind for k in some.fabric} == {"nvlink", "pcie", "host", "socket"}


def test_the_fabric_has_no_nics_that_lead_nowhere() -> None:
    pcie = load("pcie-8")
    assert with_nics(pcie).fabric == pcie.links
    assert with_nics(pcie).isomorphic_to(pcie) is not None
    some = load("dgx1-v100").subset([0, 5])  # switch1 and switch3 have no GPU left
    used = {v for k in some.fabric for v in (k.src, k.dst)}
    assert used == {0, 5, "switch0", "switch2", "cpu0", "cpu1"}
    assert set(some.switches) > used - {0, 5}
    joined = load("2 x pcie-4")  # here the NICs do lead somewhere
    assert {k.kind for k in joined.fabric} == {"pcie", "network"}
    assert joined.fabric == joined.links


def test_hops_are_of_the_fabric_and_ways_of_all_links() -> None:
    dgx1 = load("dgx1-v100")
    assert (0, 5) not in dgx1.hops
    assert dgx1.ways[0, 5] == (0, "switch0", "cpu0", "cpu1", "switch2", 5)
    assert dgx1.hops[0, 1] == dgx1.ways[0, 1] == (0, 1)
    assert dgx1.subset([0, 5]).hops[0, 5] == dgx1.ways[0, 5]
    mesh = load("mesh-3")
    assert mesh.hops is mesh.ways


def test_nvlink_is_the_way_even_where_it_is_longer() -> None:
    links = (*both(0, "x"), *both("x", "y"), *both("y", 1),
             *both(0, "switch", kind="pcie"), *both(1, "switch", kind="pcie"))  # fmt: skip
    topo = Topology("long", (0, 1), links)
    assert topo.hops[0, 1] == topo.ways[0, 1] == (0, "x", "y", 1)
    far = Topology("far", (0, 1, 2), (*links, *both(2, "switch", kind="pcie")))
    assert far.hops[0, 1] == (0, "x", "y", 1)  # all links are the fabric, and NVLink goes first
    assert far.hops[0, 2] == (0, "switch", 2)


def test_json_with_forwarders_keeps_the_fabric() -> None:
    topo = load("dgx1-v100").subset([0, 5], [1])
    again = load(topo.to_json())
    assert (again.gpus, again.forwarders, again.fabric) == ((0, 5), (1,), topo.fabric)
    with pytest.raises(TopologyError, match="listed twice"):
        load("dgx1-v100").subset([0, 1], [1])
