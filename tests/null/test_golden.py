"""One small plan of every named algorithm, as text, against the file that was read and approved."""

from __future__ import annotations

from pathlib import Path

import pytest

from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.collective import COLLECTIVES, SENDRECV
from linkweave.collectives.planning.planner import plan_collective
from linkweave.topology import load

FOLDER = Path(__file__).parents[1] / "golden"
MACHINES = {  # the smallest on which the algorithm shows what it is
    "ring": "mesh-3",
    "overlapped_double_tree": "dgx1-v100",
    "hierarchical": "2 x mesh-2",
    "hierarchical_ring": "2 x mesh-2",
    "ccube_dgx1": "dgx1-v100",
}


def _machine(collective: str, name: str) -> str:
    if collective == "allreduce" or name == "hierarchical":
        return MACHINES.get(name, "mesh-4")
    return "mesh-3"


CASES = [
    (collective, name, _machine(collective, name))
    for collective, named in ALGORITHMS.items()
    for name in named
]


def file_of(collective: str, algorithm: str, machine: str) -> Path:
    return FOLDER / f"{machine.replace(' ', '')}-{collective}-{algorithm}.txt"


@pytest.mark.parametrize(("collective", "algorithm", "machine"), CASES, ids=str)
def test_the_plan_is_the_approved_one(
    collective: str, algorithm: str, machine: str, update_golden: bool
) -> None:
    """After a wanted change, `pytest --update-golden` writes the files anew."""
    topology = load(machine)
    size, root = len(topology.gpus), ((0, 1),) if collective == SENDRECV else 0
    plan = plan_collective(collective, topology, size << 20, root, algorithm)
    plan = plan.with_chunks(2 if COLLECTIVES[collective].layout.blocks(size) == 1 else plan.stride)
    path, text = file_of(collective, algorithm, machine), f"{plan}\n"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_plan_is_left_over() -> None:
    assert set(FOLDER.glob("*.txt")) == {file_of(*case) for case in CASES}
