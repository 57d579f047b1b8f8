"""The EmbRace paper's tables: costs and timelines by hand, and what rows there are."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave.bench.reproduce import embrace as tables
from linkweave.bench.reproduce import embrace_model
from linkweave.bench.reproduce.embrace import HALF, exact_over_equation, gradient, speeds
from linkweave.bench.reproduce.embrace_model import (
    BANDWIDTH,
    BASELINES,
    FIGURE4,
    MB,
    MODELS,
    STARTUP,
    UTILISATIONS,
    WAYS,
    WORKERS,
    Cluster,
    Model,
    Sizes,
    Step,
    Task,
    adapter_bytes,
    baseline_period,
    embrace_period,
    ends,
    equation_seconds,
    forward_seconds,
    shared_seconds,
    sizes,
    wins,
    zipf,
)

LM, GNMT, TRANSFORMER, BERT = MODELS
SMALL = Model("small", 2.0, 1.0, 1, (2,), 1.0, 1.0, 1.0, 0, 0, 0, (1, 1), ((1, 1), (1, 1)))


def test_models_have_the_papers_numbers() -> None:
    """Rows and tokens follow from sizes: GNMT-8's 32,320 words, BERT-base's 32 x 384 tokens."""
    assert (GNMT.rows, GNMT.tokens(), GNMT.tokens(1)) == (32_320, 3328, 832)
    assert BERT.tokens() == 32 * 384 and BERT.tokens(1) == 4 * 384
    assert LM.tokens() == LM.tokens(1) == 2227 and TRANSFORMER.tokens(1) == 440
    for model in MODELS:
        assert round(100 * (1 - model.original / model.embedding), 1) == model.sparsity
        for before, after, said in (
            (model.original, model.coalesced, model.coalescing),
            (model.coalesced, model.prioritized, model.priority),
        ):  # sizes are printed with one digit
            low = 100 * (1 - (after + 0.05) / (before - 0.05))
            high = 100 * (1 - (after - 0.05) / (before + 0.05))
            assert low <= said <= high


@pytest.mark.parametrize(
    ("way", "seconds"), [("alltoall", 14), ("allreduce", 14), ("ps", 64), ("allgather", 56)]
)
def test_equations_of_eight_seconds(way: str, seconds: float) -> None:
    """d M / B = M / B = 8 on two nodes of four, and the start-ups of each way."""
    startups = {"alltoall": 14, "allreduce": 14, "ps": 16, "allgather": 7}[way]
    expected = seconds + startups * STARTUP
    assert equation_seconds(way, FIGURE4["4a"], 8 * BANDWIDTH) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("way", "nbytes"), [("alltoall", 32), ("allreduce", 14), ("ps", 32), ("allgather", 56)]
)
def test_bytes_through_an_adapter(way: str, nbytes: int) -> None:
    assert adapter_bytes(way, Cluster(8, 2), 8.0) == nbytes
    assert adapter_bytes(way, Cluster(4, 1), 8.0) == 0


def test_only_all_to_all_is_slower_where_nodes_share_adapters() -> None:
    nbytes = 100.0 * MB
    for way in WAYS:
        for cluster in (Cluster(4, 1), Cluster(4, 4)):
            own = equation_seconds(way, cluster, nbytes)
            assert shared_seconds(way, cluster, nbytes) == pytest.approx(own, rel=1e-12)
        own, shared = (f(way, Cluster(8, 2), nbytes) for f in (equation_seconds, shared_seconds))
        slower = {"alltoall": (32 - 14) / 8 * nbytes / BANDWIDTH}.get(way, 0)
        assert shared - own == pytest.approx(slower, rel=1e-12, abs=1e-15)


def test_where_all_to_all_wins() -> None:
    """By the equations, all-to-all meets all-gather where d M (1 - 2 / N) / B = b."""
    whole = GNMT.embedding * MB
    for cluster in FIGURE4.values():
        assert wins(equation_seconds, cluster, "allreduce", whole) == (0, 1)
        assert wins(equation_seconds, cluster, "ps", whole) == (0, 1)
        density = STARTUP * BANDWIDTH / (whole * (1 - 2 / cluster.workers))
        start, stop = wins(equation_seconds, cluster, "allgather", whole) or (0, 0)
        assert start == 0 and 1 - stop == pytest.approx(density, rel=1e-9)
    assert wins(shared_seconds, FIGURE4["4b"], "allreduce", whole) == (0, 1)
    start, stop = wins(shared_seconds, FIGURE4["4a"], "allreduce", whole) or (0, 0)
    assert start == pytest.approx(1 - 1.75 / 4, rel=1e-12) and stop == 1
    assert wins(equation_seconds, Cluster(2, 2), "allgather", whole) is None


def test_sizes_of_batches_by_hand() -> None:
    """Two workers; the last batches are only looked up."""
    batches = np.array(
        [[[1, 1, 2, 3], [4, 4, 4, 5]], [[2, 6, 6, 6], [3, 5, 7, 7]], [[9, 9, 9, 9], [7, 6, 2, 1]]]
    )
    # distinct: {1,2,3} {4,5} | {2,6} {3,5,7}; prior: {2,3} {5} | {2,6} {7}; own: {2} {5} | {} {7}
    assert sizes(batches) == Sizes(4, 10 / 4, 6 / 4, 3 / 4)


def test_zipf_tokens_follow_the_law() -> None:
    """The mean of distinct tokens is within 1 % of its expectation, and the draw is always the
    same."""
    batches = zipf(1000, 16, 500)
    assert batches.shape == (8, 16, 500) and batches.min() >= 0 and batches.max() < 1000
    assert (batches == zipf(1000, 16, 500)).all()
    shares = 1 / np.arange(1, 1001)
    shares /= shares.sum()
    expected = (1 - (1 - shares) ** 500).sum()
    assert sizes(batches).coalesced == pytest.approx(expected, rel=0.01)


def test_tasks_wait_for_others_and_for_their_resource() -> None:
    tasks = [
        Task("compute", 2, 0, ()), Task("network", 3, 5, ()), Task("network", 1, 9, (0,)),
        Task("network", 1, 1, (0,)), Task("compute", 1, 1, (3,)), Task("compute", 4, 2, (0,)),
    ]  # fmt: skip
    # the first message is not interrupted, then the smaller priority goes first
    assert ends(tasks) == [2, 3, 5, 4, 7, 6]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """A table and two blocks, each 1 s forward and 2 s backward; exchanges of 2 or 3 s."""
    taken = {"alltoall": 2.0, "allreduce": 2.0, "ps": 3.0, "allgather": 3.0}
    monkeypatch.setattr(embrace_model, "shared_seconds", lambda way, cluster, nbytes: taken[way])
    return Step(SMALL, Cluster(4, 1), Sizes(4, 3, 2, 1), 2.0)


@pytest.mark.parametrize(
    ("method", "period"),
    [("Horovod AllReduce", 10), ("Horovod AllGather", 11), ("Parallax", 11), ("BytePS", 13)],
)
def test_periods_of_baselines_by_hand(step: Step, method: str, period: float) -> None:
    """The second block is sent beside the first one's backward pass, from 2 to 4 or 5 s. Then
    FIFO sends the first block and the table; BytePS the table and then the first block, for which
    the forward pass waits from 8 to 11 s."""
    assert baseline_period(step, method) == period


def test_the_period_of_embrace_by_hand(step: Step) -> None:
    """The first block's gradients are sent from 4 to 6 s, prior rows to 7 and lookups to 8 s;
    delayed rows beside the forward pass, which ends at 10 s."""
    assert embrace_period(step) == 10


def test_nothing_is_slower_than_computing_on_a_fast_network(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embrace_model, "shared_seconds", lambda way, cluster, nbytes: 0.0)
    assert {baseline_period(step, name) for name in BASELINES} == {6.0} == {embrace_period(step)}


def test_a_step_sends_what_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a block and of a table, for tables of width 1 and 2^18 rows."""
    sent: set[tuple[str, float]] = set()

    def record(way: str, cluster: Cluster, nbytes: float) -> float:
        sent.add((way, nbytes))
        return 1.0

    monkeypatch.setattr(embrace_model, "shared_seconds", record)
    step = Step(SMALL, Cluster(4, 1), Sizes(400, 300, 200, 100), 2.0)
    for name, bytes_sent in {
        "BytePS": {("ps", MB / 2), ("ps", MB)},
        "Horovod AllReduce": {("allreduce", MB / 2), ("allreduce", MB)},
        "Horovod AllGather": {("allreduce", MB / 2), ("allgather", 1600)},
        "Parallax": {("allreduce", MB / 2), ("ps", 1600)},
    }.items():
        sent.clear()
        baseline_period(step, name)
        assert sent == bytes_sent
    sent.clear()
    embrace_period(step)
    assert sent == {("allreduce", MB / 2), *(("alltoall", 4.0 * n) for n in (200, 100, 400))}


def test_a_forward_pass_takes_two_operations_a_parameter_and_token() -> None:
    parameters = (739.1 - 252.5) * MB / 4
    assert forward_seconds(GNMT, 0, 1e12) == pytest.approx(2 * parameters * 3328 / 1e12, rel=1e-12)
    assert forward_seconds(GNMT, 1, 1e12) == forward_seconds(GNMT, 0, 4e12)


def test_table_2_for_gnmt() -> None:
    """Coalesced gradients of 12.2 MB on two nodes of four: 2 x 7 / 8 of them, and 14 start-ups."""
    tokens = round(12.2 * MB / 8192)  # of each of two tables
    exact = 2 * (28 * STARTUP + 7 * (8 + tokens * (4 + 2 * 1024 * 4 / 8)) / 12.5e9)
    equation = 1.75 * 12.2 * MB / 12.5e9 + 14 * STARTUP
    assert exact_over_equation(Cluster(8, 2)) == pytest.approx(exact / equation, rel=1e-12)


def test_priority_saves_as_the_text_says() -> None:
    for model in MODELS:
        g = gradient(model)
        assert g.own_prior < g.prior < g.coalesced < g.original
        saved = 100 * (1 - g.prior / g.coalesced), 100 * (1 - g.own_prior / g.coalesced)
        assert saved[0] < model.priority < saved[1]


def test_speeds_follow_from_the_rows() -> None:
    found = speeds(GNMT, 0)
    assert [(s.workers, s.utilisation) for s in found] == [
        (workers, share) for workers in WORKERS for share in UTILISATIONS
    ]
    for s in found:
        assert s.best == min(s.baselines.values()) and s.speedup == s.best / s.embrace >= 1
        assert s.stall_ratio == (s.best - s.compute) / (s.embrace - s.compute) > 1
        assert s.baselines["BytePS"] > s.baselines["Parallax"]


def test_rows_are_complete() -> None:
    part = tables.tables()
    found = {(row.item, row.what): row.ours for row in part.rows}
    assert len(found) == len(part.rows) == 29
    what = "sparsity at which all-to-all is no slower than allreduce"
    assert found["figure 4a", what] == "0% to 100.00%"
    assert found["figure 4a", f"{what}, adapters shared"] == "56% to 100.00%"
    assert [series.name for series in part.plots[0].series] == [*WAYS]
    part = tables.training()
    rows = {(row.item, row.what): row for row in part.rows}
    assert len(rows) == len(part.rows) == 31
    assert rows["figure 7", "LM, RTX2080: over the best baseline, most"].ours is None
    row = rows["figure 7", "GNMT-8, RTX3090: over the best baseline, most"]
    of_half = [s.speedup for s in speeds(GNMT, 0) if s.utilisation == HALF]
    assert row.ours == max(of_half) and "1.26 over 25 to 100 %" in row.reason
