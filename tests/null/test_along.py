"""What goes along with the comparison of a call fits the frames that machines receive."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave.collectives.cluster.cluster_map import (
    AT_ONCE,
    goes_along,
    is_passed_on,
    most_along,
    rounds,
)
from linkweave.collectives.cluster.kinds import Along, ClusterCall

ITEM = 8  # bytes of the largest element, by which a machine's share may exceed an equal one


@pytest.mark.parametrize("machines", [2, 3, 5, 7, 8, 16, 33, 64, 128])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_goes_along_fits(machines: int, most: int) -> None:
    room = most_along(machines, most)
    assert room * (machines - 1) <= 17 << 20 or room <= 2 * AT_ONCE
    for nbytes in (*range(1, 5 << 20, 4093), room - 64, room):
        if goes_along(nbytes, machines, most):
            assert nbytes + ITEM <= room
        assert not goes_along(nbytes, machines, most, same=True) or 4 * nbytes <= 512 << 10
        assert not is_passed_on(nbytes, machines, most) or nbytes <= room
    assert AT_ONCE // (machines - 1) <= room


@pytest.mark.parametrize("machines", [2, 3, 5, 7, 8, 16, 33])
def test_what_is_passed_on_reaches_all_in_the_fewest_rounds(machines: int) -> None:
    along = Along(np.zeros(1, np.uint8), [1] * machines, print)
    for source in {0, 1, machines - 1}:
        call = ClusterCall("broadcast", None, along, source, passed_on=True)
        ways = [call.ways(m, machines) for m in range(machines)]
        for m, (tell, hear) in enumerate(ways):
            assert len(tell) == (m != source)
            assert all(m in ways[of][1] for of in tell) and all(ways[to][0] == [m] for to in hear)
        after = {source: 0}  # as many rounds; a machine sends to one in each
        for m in sorted(range(machines), key=lambda m: (m - source) % machines):
            for number, to in enumerate(ways[m][1], 1):
                after[to] = after[m] + number
        assert len(after) == machines and max(after.values()) == rounds(machines)


def test_a_call_without_a_source_is_heard_by_all() -> None:
    along = Along(np.zeros(1, np.uint8), [1] * 3, print)
    assert ClusterCall("reduce", None, along, target=1).ways(0, 3) == ([], [1])
    assert ClusterCall("reduce", None, along, target=1).ways(1, 3) == ([0, 2], [])
    assert ClusterCall("scatter", None, along, source=1).ways(1, 3) == ([], [0, 2])
    assert ClusterCall("barrier", None).ways(0, 3) == ([1, 2], [1, 2])
    assert ClusterCall("broadcast", None, source=1, passed_on=True).ways(0, 3) == ([1, 2], [1, 2])
