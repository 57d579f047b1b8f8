"""Machines with links more or fewer, and `linkweave what-if`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from linkweave import collectives, topology
from linkweave.topology import CollectiveError, Link, Topology
from linkweave.topology.edits import Ends, parse_ends, with_links, with_nics, without_links
from tests.null.helpers import linkweave


def count(machine: Topology, a: int | str, b: int | str) -> tuple[int, int]:
    return tuple(  # type: ignore[return-value]
        link.count if (link := machine.by_ends.get(ends)) else 0 for ends in ((a, b), (b, a))
    )


def told(words: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(linkweave("what-if", *words.split(), "--json"))
    return found


def test_links_are_removed_and_added_each_way() -> None:
    machine = topology.load("dgx1-v100")
    assert count(without_links(machine, Ends(2, 6)), 2, 6) == (0, 0)
    assert count(without_links(machine, Ends(3, 0, 1)), 0, 3) == (1, 1)
    assert count(with_links(machine, Ends(0, 3)), 0, 3) == (3, 3)
    fresh = with_links(machine, Ends(0, 7, 2))
    assert count(fresh, 0, 7) == (2, 2)
    assert fresh.by_ends[0, 7].bandwidth == 25 * 10**9 and not fresh.by_ends[0, 7].assumed
    back = with_links(without_links(machine, Ends(2, 6)), Ends(2, 6))
    assert back.links == machine.links
    assert back.isomorphic_to(machine)


def test_links_into_a_switch() -> None:
    machine = topology.load("dgx-a100")
    fewer = without_links(machine, parse_ends("0-nvswitch=3", "--remove-link"))
    assert count(fewer, 0, "nvswitch") == (9, 9)


def test_more_nics_carry_more() -> None:
    machine = topology.load("2 x dgx1-v100 nics=1 nic=3GB/s")
    more = with_nics(machine, 1)
    assert topology.allreduce_bound(more) == 2 * topology.allreduce_bound(machine)
    collectives.verify(collectives.plan_allreduce(more, 1 << 20), more)


@pytest.mark.parametrize("text", ["2-6", " 2-6=1 ", "nvswitch-0=12"])
def test_ends_are_read(text: str) -> None:
    found = parse_ends(text, "--add-link")
    assert f"{found.one}-{found.other}" == text.split("=")[0].strip()
    assert found.count == (int(text.split("=")[1]) if "=" in text else None)


@pytest.mark.parametrize("text", ["2", "2-", "2-6=0", "2-6=x", "2-6-7", "2 6", ""])
def test_what_are_no_ends_is_refused(text: str) -> None:
    with pytest.raises(CollectiveError, match="--add-link is like 2-6, 2-6=1"):
        parse_ends(text, "--add-link")


def test_before_and_after_are_what_each_machine_gives() -> None:
    found = told("dgx1-v100 --remove-link 2-6 --size 1M")
    machine = topology.load("dgx1-v100")
    for side, one in (("before", machine), ("after", without_links(machine, Ends(2, 6)))):
        assert found[side]["bound"] == topology.allreduce_bound(one)
        plan = collectives.plan_allreduce(one, 1 << 20)
        assert found[side]["algorithm"] == plan.algorithm
        assert found[side]["seconds"] == collectives.simulate(plan, one, 1 << 20).seconds
        assert found[side]["steps"] == {}
    assert 0 < found["after"]["bound"] < found["before"]["bound"]  # type: ignore[operator]


def test_steps_of_a_model_and_another_machine(tmp_path: Path) -> None:
    png = tmp_path / "w.png"
    found = told(f"ring-3 --to mesh-3 --model googlenet --tflops 50 --size 1M --png {png}")
    assert found["before"]["machine"] == "ring-3" and found["after"]["machine"] == "mesh-3"
    steps = [found[side]["steps"] for side in ("before", "after")]
    assert steps[0] == steps[1]  # three in a ring are a mesh
    assert set(steps[0]) == {"ddp", "mg-wfbp", "us-byte", "c-cube"}  # type: ignore[call-overload]
    assert png.stat().st_size > 10_000


def test_the_text_fits() -> None:
    text = linkweave("what-if", "ring-4", "--add-link", "0-2", "--size", "64K")
    assert "after:  ring-4 with 0-2=1" in text and "bottleneck after:" in text
    assert max(map(len, text.splitlines())) <= 100


def test_nics_on_a_gpu_share_its_port() -> None:
    cluster = topology.load("2 x dgx-a100")
    more = with_nics(cluster, 1)
    network = {ends for ends, link in cluster.by_ends.items() if link.kind == "network"}
    for ends, link in more.by_ends.items():
        assert link.count == cluster.by_ends[ends].count * (2 if ends in network else 1)
    assert topology.allreduce_bound(more) == topology.allreduce_bound(cluster)


def test_links_of_one_direction() -> None:
    """The other direction is like it."""
    one_way = Topology("two", (0, 1), (Link(0, 1, 10**9, 2, 7.0, "host"),))
    more = with_links(one_way, Ends(0, 1, 3))
    assert {ends: link.count for ends, link in more.by_ends.items()} == {(0, 1): 5, (1, 0): 3}
    assert more.by_ends[1, 0] == Link(1, 0, 10**9, 3, 7.0, "host")
    assert with_links(one_way, Ends(0, 1, None)).by_ends[1, 0].count == 1


def test_a_negative_number_of_nics_is_refused() -> None:
    with pytest.raises(CollectiveError, match="must be at least 1, not -1"):
        with_nics(topology.load("2 x mesh-2"), -1)
