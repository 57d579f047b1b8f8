"""Times of an embedding's communication: table 2 by hand, exact bytes, where the choice changes."""

from __future__ import annotations

import pytest

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Network, Way, embedding_ways, explain_embedding
from linkweave.collectives.overlap import embedding_times as times
from linkweave.collectives.overlap.network import sparse_seconds
from linkweave.collectives.planning.equations import (
    allgather_seconds,
    allreduce_seconds,
    alltoall_seconds,
    parameter_server_seconds,
)


def network(workers: int, startup: float, pace: float) -> Network:
    """The network of which a message takes `startup` and `pace` a byte."""
    steps = 2 * (workers - 1)
    return Network(steps * startup, steps / workers * pace, 2.0, workers, "ring")


def by_name(*arguments: object) -> dict[str, Way]:
    return {way.name: way for way in embedding_ways(*arguments)}  # type: ignore[arg-type]


def test_the_four_equations_by_hand() -> None:
    """N = 4 workers, alpha M / B = 8 or M / B = 80, n = 2 nodes, beta = 3."""
    assert alltoall_seconds(4, 3.0, 8.0) == 2 * 3 * (8 / 4 + 3) == 30
    assert allreduce_seconds(4, 3.0, 80.0) == 2 * 3 * (80 / 4 + 3) == 138
    assert parameter_server_seconds(4, 2, 3.0, 8.0) == 2 * 4 * (8 / 2 + 3) == 56
    assert allgather_seconds(4, 3.0, 8.0) == 3 * (8 + 3) == 33


def test_one_worker_sends_nothing_by_the_equations_but_for_the_server() -> None:
    assert alltoall_seconds(1, 3.0, 8.0) == allreduce_seconds(1, 3.0, 8.0) == 0
    assert allgather_seconds(1, 3.0, 8.0) == 0
    assert parameter_server_seconds(1, 1, 3.0, 8.0) == 22


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_at_density_one_alltoall_takes_what_allreduce_takes(workers: int) -> None:
    assert alltoall_seconds(workers, 3.0, 80.0) == allreduce_seconds(workers, 3.0, 80.0)


def test_a_message_has_what_the_ring_is_made_of() -> None:
    assert Network(84.0, 1.75, workers=8).message == (6.0, 1.0)
    assert Network(1.0, 1.0, workers=1).message == (0.5, 0.5)
    taken = sparse_seconds(Network(84.0, 1.75, workers=8), 1000, 10)
    assert taken == {"gtopk": 2 * 3 * (6 + 80), "topk": 3 * 6 + 7 * 80, "dense": 84 + 1750}


def test_bytes_and_seconds_are_exact() -> None:
    """100 rows x 8 float32 on 4 ranks, 10 tokens each; start-up 1000, a byte takes 1."""
    ways = by_name(network(4, 1000, 1), 100, 8, 10)
    assert ways["alltoall"] == Way(
        "alltoall",
        12 * 1000 + 3 * 8 + 3 * (10 * 4) + 2 * 3 * (10 * 2 * 4),
        3 * 8 + 3 * 10 * 4 + 3 * 10 * 2 * 4 + 10 * (8 - 2) * 4,
        12,
        2 * 3 * (10 * 8 * 4 / 4 + 1000),
    )
    assert ways["allgather"] == Way(
        "allgather", 6 * 1000 + 3 * 10 * (8 + 32), 3 * 10 * (8 + 32), 6, 3 * (10 * 32 + 1000)
    )
    assert ways["allreduce"] == Way(
        "allreduce", 6 * 1000 + 2 * 3 * 800, 2 * 3 * 800, 6, 6 * 1000 + 2 * 3 * 800
    )


def test_the_widest_range_of_columns_sets_the_time() -> None:
    """7 columns on 4 ranks are 2, 2, 2 and 1; 2 columns on 4 ranks are 1, 1, 0 and 0."""
    seven = by_name(network(4, 0, 1), 100, 7, 10, 8)["alltoall"]
    assert seven.seconds == 3 * 8 + 3 * (10 * 4) + 2 * 3 * (10 * 2 * 8)
    assert seven.nbytes == 3 * 8 + 3 * 10 * 4 + 3 * 10 * 2 * 8 + 10 * 5 * 8
    two = by_name(network(4, 0, 1), 100, 2, 10, 2)["alltoall"]
    assert two.seconds == 3 * 8 + 3 * (10 * 4) + 2 * 3 * (10 * 1 * 2)
    assert two.nbytes == 3 * 8 + 3 * 10 * 4 + 3 * 10 * 1 * 2 + 10 * 1 * 2


@pytest.mark.parametrize(("rows", "index"), [(1 << 31, 4), ((1 << 31) + 1, 8)])
def test_indices_are_int32_where_they_fit(rows: int, index: int) -> None:
    ways = by_name(network(2, 0, 1), rows, 2, 10)
    assert ways["alltoall"].nbytes == 8 + 10 * index + 10 * 4 + 10 * 4
    assert ways["allgather"].nbytes == 10 * (8 + 8)


def test_two_ranks_gather_because_start_ups_decide() -> None:
    """At N = 2, both transmit alpha M and all-gather has fewer start-ups."""
    told = explain_embedding(network(2, 1e-5, 1e-9), 10_000, 64, 20)
    assert told.choice == "allgather"
    assert told.reason == (
        "start-ups decide: allgather has 2 against 4; 1.79 times faster than alltoall, although it "
        "sends 5,280 bytes a rank against 5,208"
    )
    ways = {way.name: way for way in told.ways}
    assert ways["allgather"].equation_seconds < ways["alltoall"].equation_seconds


def test_without_start_ups_two_ranks_choose_by_indices() -> None:
    ways = by_name(network(2, 0, 1), 10_000, 512, 1000)
    assert ways["allgather"].seconds - ways["alltoall"].seconds == 1000 * (8 - 4) - 8


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_a_dense_batch_is_reduced(workers: int) -> None:
    """At density 1, the all-to-all transmits the dense gradient's bytes, counts and indices."""
    ways = by_name(network(workers, 1e-5, 1e-9), 10_000, 512, 10_000)
    assert min(ways.values(), key=lambda way: way.seconds).name == "allreduce"
    indices = (workers - 1) * ((8 + 10_000 * 4) * 1e-9 + 2 * 1e-5)
    assert ways["alltoall"].seconds - ways["allreduce"].seconds == pytest.approx(indices, rel=1e-9)


def test_more_ranks_turn_the_choice_to_all_to_all() -> None:
    """Gathered bytes grow with N - 1, those of the all-to-all with (N - 1) / N."""
    choices = [explain_embedding(network(n, 1e-5, 1e-9), 10_000, 512, 30).choice
               for n in (2, 3, 4, 64)]  # fmt: skip
    assert choices == ["allgather", "alltoall", "alltoall", "alltoall"]


def test_the_choice_changes_at_the_crossovers() -> None:
    """N = 8, start-up 10 us, 1 ns a byte, rows of 2048 bytes. All-to-all has 14 more start-ups,
    7 x 8 bytes of counts and 7 (8 + 2048 - 4 - 512) bytes fewer a token than all-gather, so it is
    faster from 20,008 / 1540 = 13.0 tokens on; all-reduce from where 14 start-ups, the counts and
    7 (4 + 512) bytes a token exceed 14 / 8 bytes of the table: 9,883.7 tokens."""
    net = network(8, 1e-5, 1e-9)
    told = explain_embedding(net, 10_000, 512, 100)
    assert told.crossovers == ((0, "allgather"), (13, "alltoall"), (9884, "allreduce"))
    for tokens, name in told.crossovers:
        assert explain_embedding(net, 10_000, 512, tokens).choice == name
        if tokens:
            assert explain_embedding(net, 10_000, 512, tokens - 1).choice != name


def test_the_text() -> None:
    lines = str(explain_embedding(network(8, 1e-5, 1e-9), 10_000, 512, 100)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "embedding of 10000 x 512 on ring, 8 workers: alltoall"
    assert lines[1].startswith("bytes decide: alltoall sends 361,256 bytes a rank against")
    assert lines[5].split() == ["alltoall", "641.3", "1.00", "0.361", "28", "498.4", "us"]
    assert [line.split()[0] for line in lines[5:8]] == ["alltoall", "allgather", "allreduce"]
    assert " ".join(lines[9:]) == (
        "density 0.01 (100 distinct rows a batch); by density: allgather, alltoall from 0.0013 "
        "(13 rows), allreduce from 0.9884 (9884 rows)"
    )


def test_one_rank_has_nothing_to_send() -> None:
    told = explain_embedding(Network(1.0, 1.0, workers=1), 100, 8, 10)
    assert {(way.seconds, way.nbytes, way.startups) for way in told.ways} == {(0, 0, 0)}
    assert told.reason == "one rank has nothing to send"
    assert told.crossovers == ((0, "alltoall"),)


def test_an_empty_batch_costs_start_ups_and_the_dense_gradient() -> None:
    ways = by_name(network(4, 10, 1), 100, 8, 0)
    assert [ways[n].seconds for n in ("alltoall", "allgather", "allreduce")] == [144, 60, 4860]
    assert (ways["alltoall"].nbytes, ways["allgather"].nbytes) == (24, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 8, 0), "rows must be an integer from 1 to 1099511627776, not 0"),
        ((100, 8.0, 1), "width must be an integer from 1 to 1099511627776, not 8.0"),
        ((100, 8, 101), "tokens must be an integer from 0 to 100, not 101"),
        ((100, 8, -1), "tokens must be an integer from 0 to 100, not -1"),
        ((100, 8, 1, 3), "itemsize must be 2, 4 or 8 bytes, not 3"),
    ],
)
@pytest.mark.parametrize("function", [times.embedding_ways, times.explain_embedding])
def test_bad_input(function: object, arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        function(network(4, 1, 1), *arguments)  # type: ignore[operator]
    assert str(caught.value) == said
