"""What goes along with the comparison of a call fits the frames that machines receive."""

from __future__ import annotations

import pytest

from linkweave.collectives.cluster.cluster_map import AT_ONCE, goes_along, most_along

ITEM = 8  # bytes of the largest element, by which a machine's share may exceed an equal one


@pytest.mark.parametrize("machines", [2, 3, 5, 7, 8, 16, 33, 64, 128])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_goes_along_fits(machines: int, most: int) -> None:
    room = most_along(machines, most)
    assert room * (machines - 1) <= 17 << 20 or room <= 2 * AT_ONCE
    for nbytes in (*range(1, 5 << 20, 4093), room - 64, room):
        if goes_along(nbytes, machines, most):
            assert nbytes + ITEM <= room
        assert not goes_along(nbytes, machines, most, quarter=True) or 4 * nbytes <= 512 << 10
    assert AT_ONCE // (machines - 1) <= room
