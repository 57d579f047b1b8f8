"""Pictures as geometry: nothing lies on anything else, on all kinds of machines."""

from __future__ import annotations

from itertools import combinations

import pytest

from linkweave.topology import Topology, load
from linkweave.topology.clusters import nodes_of
from linkweave.topology.layout import RADIUS, lay_out
from linkweave.topology.text import cables
from tests.null.helpers import renumbered

SPECS = [
    "dgx1-v100", "dgx1-p100", "mesh-6", "mesh-12", "ring-9", "dgx2", "dgx-a100", "pcie-4",
    "pcie-8", "pcie-17", "cpu-2", "cpu-8", "2 x dgx1-v100", "4 x dgx1-v100", "4 x dgx-a100",
    "3 x pcie-4 nics=1", "4 x pcie-8", "4 x mesh-4", "4 x dgx-h100 leaf=2 oversubscription=2",
    "2 x ring-4 nics=1",
]  # fmt: skip
SUBSETS = [(0, 5, 6, 3), (0, 5), (1, 4, 6), (7, 0, 3), (0, 1, 2, 4, 5, 6, 7)]


def machines() -> list[Topology]:
    dgx1 = load("dgx1-v100")
    mixed = renumbered(dgx1, [4, 0, 7, 3, 1, 5, 2, 6])
    return [*map(load, SPECS), *map(dgx1.subset, SUBSETS), mixed, mixed.subset((1, 2, 3))]


MACHINES = machines()
every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)


def boxes_overlap(a: tuple[complex, complex], b: tuple[complex, complex]) -> bool:
    return (a[0].real < b[1].real and b[0].real < a[1].real
            and a[0].imag < b[1].imag and b[0].imag < a[1].imag)  # fmt: skip


def inside(p: complex, box: tuple[complex, complex]) -> bool:
    low, high = box
    return low.real < p.real < high.real and low.imag < p.imag < high.imag


@every_machine
def test_no_two_things_overlap(machine: Topology) -> None:
    layout = lay_out(machine, machine.fabric, arcs=False)
    assert set(layout.seats) == set(machine.gpus)
    for (g, p), (h, q) in combinations(layout.seats.items(), 2):
        assert abs(p - q) > 2.5 * RADIUS, (g, h)
    for (name, one), (other, two) in combinations(layout.boxes.items(), 2):
        assert not boxes_overlap(one, two), (name, other)
    for name, (low, high) in layout.boxes.items():
        wide = (low - RADIUS * (1 + 1j), high + RADIUS * (1 + 1j))
        assert not [g for g, p in layout.seats.items() if inside(p, wide)], name
    for at, caption in layout.captions:
        assert not any(inside(at, box) for box in layout.boxes.values()), caption


@every_machine
def test_lines_end_where_they_should_and_run_through_no_gpu(machine: Topology) -> None:
    layout = lay_out(machine, machine.fabric, arcs=False)
    for link, _ in cables(machine.fabric):
        points = layout.curve(link.src, link.dst)
        for end, point in ((link.src, points[0]), (link.dst, points[-1])):
            if isinstance(end, int):
                assert abs(point - layout.seats[end]) < 1e-9
            else:
                low, high = layout.boxes[end]
                assert low.real - 1e-9 <= point.real <= high.real + 1e-9, link
                assert low.imag - 1e-9 <= point.imag <= high.imag + 1e-9, link
        for gpu, seat in layout.seats.items():
            if gpu not in (link.src, link.dst):
                assert min(abs(p - seat) for p in points) > RADIUS, (link, gpu)


@every_machine
def test_lines_pass_beneath_network_switches_only(machine: Topology) -> None:
    layout = lay_out(machine, machine.fabric, arcs=False)
    for link, _ in cables(machine.fabric):
        for name, box in layout.boxes.items():
            if name not in (link.src, link.dst) and name not in layout.passed:
                points = layout.curve(link.src, link.dst)
                assert not any(inside(p, box) for p in points), (link, name)


def test_nodes_are_what_stays_together_without_the_network() -> None:
    assert nodes_of(load("3 x pcie-4")) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert nodes_of(load("dgx1-v100")) == [tuple(range(8))]
