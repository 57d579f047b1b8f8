"""What `auto` leaves: its simulated time over the best of all algorithms and numbers of chunks."""

from __future__ import annotations

import pytest

from linkweave.bench.reproduce.choice import MACHINES, Row, compare, rows, table
from linkweave.collectives.planning.planner import choose
from linkweave.topology import load


@pytest.mark.parametrize("name", ["mesh-3", "ring-5", "pcie-4", "dgx1-v100", "dgx-a100"])
def test_auto_is_near_the_best(name: str) -> None:
    machine = load(name)
    for nbytes in (1 << 10, 1 << 16, 1 << 22, 1 << 30):
        taken, ratio = compare(machine, nbytes)
        assert taken == choose(machine, nbytes)
        assert 1 <= ratio <= 1.02, nbytes


def test_a_poor_choice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "ring")
    taken, ratio = compare(load("dgx1-v100"), 1 << 13)
    assert (taken, ratio) == ("ring", pytest.approx(6.02, abs=0.01))


def test_table() -> None:
    made = Row("mesh-3", 1.0125, 1 << 16, ((1 << 10, "one_shot"), (3 << 20, "two_shot")))
    assert table([made]).splitlines() == [
        "machine  auto / best      at  auto takes",
        "mesh-3        1.0125  64 KiB  one_shot from 1 KiB, two_shot from 3 MiB",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_auto_is_near_the_best_everywhere() -> None:
    found = list(rows())
    assert tuple(row.machine for row in found) == MACHINES
    assert {row.machine: row.worst for row in found if not 1 <= row.worst <= 1.02} == {}
