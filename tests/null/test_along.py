"""What goes along with the comparison of a call fits the frames that machines receive; what calls
take, by a map."""

from __future__ import annotations

import pytest

from linkweave.bench.network import SIZES, around
from linkweave.collectives import CollectiveError
from linkweave.collectives.cluster.cluster_map import (
    AT_ONCE,
    MIDDLE,
    SHORT,
    ClusterMap,
    goes_along,
    most_along,
    rows_along,
)
from linkweave.collectives.overlap import Network
from linkweave.collectives.overlap.timing import Timing

ITEM = 8  # bytes of the largest element, by which a machine's share may exceed an equal one


@pytest.mark.parametrize("machines", [2, 3, 5, 7, 8, 16, 33, 64, 128])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_goes_along_fits(machines: int, most: int) -> None:
    room = most_along(machines, most)
    assert room * (machines - 1) <= 17 << 20 or room <= 2 * AT_ONCE
    for nbytes in (*range(1, 5 << 20, 4093), room - 64, room):
        for limit in (SHORT, MIDDLE, rows_along(most)):
            assert not goes_along(nbytes, machines, limit) or nbytes + ITEM <= room
    assert AT_ONCE // (machines - 1) <= room


def test_a_map_predicts_between_the_sizes_measured() -> None:
    times = {"reduce": (Timing(1000, 2.0), Timing(2000, 3.0), Timing(8000, 9.0))}
    made = ClusterMap((2, 1), 1e-3, Network(2e-3, 3e-9), times)
    assert ClusterMap.from_json(made.to_json()) == made
    found = [made.seconds("reduce", n) for n in (1, 1000, 1500, 5000, 8000, 16000)]
    assert found == [2.0, 2.0, 2.5, 6.0, 9.0, 17.0]
    with pytest.raises(CollectiveError, match=r"allgather was not measured: .* times of reduce"):
        made.seconds("allgather", 1000)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('"times": {"reduce": 3}', "times of reduce: timings must be a list"),
        ('"times": {"reduce": []}', "there are no times of reduce"),
        ('"times": {"reduce": [{"nbytes": 1}]}', "a timing has no seconds"),
        ('"times": 3', "is no cluster map"),
        ('"memory": 3', "measure it again with linkweave bench network"),
    ],
)
def test_a_map_that_is_none_is_refused(more: str, words: str) -> None:
    text = '{"ranks": [1, 1], "startup_s": 0, "network": {"startup_s": 0, "seconds_per_byte": 0}, '
    with pytest.raises(CollectiveError, match=words):
        ClusterMap.from_json(f'{text}"op": "sum", {more}}}')


def test_messages_are_predicted_from_sizes_around_them() -> None:
    kib, mib = 1 << 10, 1 << 20
    assert around({kib, mib}) == [2 * kib, 32 * kib, 512 * kib, 2 * mib]
    assert around({4 * mib, 64 * mib}) == [2 * mib, 8 * mib, 32 * mib]
    assert around({1}) == around({1 << 40}) == SIZES
