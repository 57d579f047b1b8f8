"""The EmbRace paper's tables: costs and timelines by hand, what rows there are, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from linkweave.bench.reproduce import embrace as tables
from linkweave.bench.reproduce import embrace_step
from linkweave.bench.reproduce.embrace import SPARSITIES, STEPPED, TOTAL, Rows, rows
from linkweave.bench.reproduce.embrace_costs import (
    WAYS,
    adapter_bytes,
    equation_seconds,
    shared_seconds,
    wins,
)
from linkweave.bench.reproduce.embrace_figures import draw
from linkweave.bench.reproduce.embrace_paper import (
    BANDWIDTH,
    CLUSTERS,
    FIGURE4,
    MB,
    MODELS,
    STARTUP,
    WORKERS,
    Cluster,
    Model,
)
from linkweave.bench.reproduce.embrace_step import (
    BASELINES,
    UTILISATIONS,
    Step,
    Task,
    baseline_period,
    embrace_period,
    ends,
    forward_seconds,
)
from linkweave.bench.reproduce.embrace_tables import tables as text_of
from linkweave.bench.reproduce.embrace_tokens import Sizes, corpus, read_words, sizes, zipf
from linkweave.collectives import CollectiveError
from tests.cpu.commands import command

LM, GNMT, TRANSFORMER, BERT = MODELS
SMALL = Model("small", 2.0, 1.0, 1, (2,), 1.0, 1.0, 1.0, 0, 0, 0, (1, 1), ((1, 1), (1, 1)))


@pytest.fixture(scope="module")
def found() -> Rows:
    return rows()


def test_models_have_the_papers_numbers() -> None:
    """Rows and tokens follow from sizes: GNMT-8's 32,320 words, BERT-base's 32 x 384 tokens."""
    assert (GNMT.rows, GNMT.tokens(), GNMT.tokens(1)) == (32_320, 3328, 832)
    assert BERT.tokens() == 32 * 384 and BERT.tokens(1) == 4 * 384
    assert LM.tokens() == LM.tokens(1) == 2227 and TRANSFORMER.tokens(1) == 440
    assert GNMT.megabytes(GNMT.rows) == 252.5 and BERT.megabytes(BERT.tokens()) == 36
    for model in MODELS:
        assert round(100 * (1 - model.original / model.embedding), 1) == model.sparsity
        for before, after, said in (
            (model.original, model.coalesced, model.coalescing),
            (model.coalesced, model.prioritized, model.priority),
        ):  # sizes are printed with one digit
            low = 100 * (1 - (after + 0.05) / (before - 0.05))
            high = 100 * (1 - (after - 0.05) / (before + 0.05))
            assert low <= said <= high


def test_the_start_up_is_that_of_the_measured_infiniband() -> None:
    assert pytest.approx(9.75367204301171e-05 / 14, rel=1e-15) == STARTUP
    assert BANDWIDTH == 12.5e9 and [c.nodes for c in CLUSTERS] == [1, 2, 4]


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
    batches = np.array([
        [[1, 1, 2, 3], [4, 4, 4, 5]],
        [[2, 6, 6, 6], [3, 5, 7, 7]],
        [[9, 9, 9, 9], [7, 6, 2, 1]],
    ])  # fmt: skip
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


def test_each_worker_reads_its_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or\nnot  to be\tthat is the question whether 'tis")
    words = read_words(path)
    assert words.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9]
    assert corpus(words, 2, 3).tolist() == [[[0, 1, 2], [4, 5, 6]], [[3, 0, 1], [7, 8, 9]]]
    assert corpus(words, 2, 2).shape == (3, 2, 2)
    assert corpus(np.arange(1000), 2, 3).shape == (8, 2, 3)
    with pytest.raises(CollectiveError) as caught:
        corpus(words, 2, 4)
    assert str(caught.value) == (
        "--corpus has 12 words; at least 16 are needed, for two batches of 4 on 2 workers"
    )


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
    monkeypatch.setattr(embrace_step, "shared_seconds", lambda way, cluster, nbytes: taken[way])
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
    monkeypatch.setattr(embrace_step, "shared_seconds", lambda way, cluster, nbytes: 0.0)
    assert {baseline_period(step, name) for name in BASELINES} == {6.0} == {embrace_period(step)}


def test_a_step_sends_what_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a block and of a table, for tables of width 1 and 2^18 rows."""
    sent: set[tuple[str, float]] = set()

    def record(way: str, cluster: Cluster, nbytes: float) -> float:
        sent.add((way, nbytes))
        return 1.0

    monkeypatch.setattr(embrace_step, "shared_seconds", record)
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


def test_rows_are_complete(found: Rows) -> None:
    clusters = [(8, 2), (4, 4), (4, 1), (16, 4)]
    assert [(o.workers, o.nodes, o.gradient, o.way) for o in found.table2] == [
        (*cluster, gradient, way)
        for cluster in clusters for gradient in ("original", "coalesced") for way in WAYS
    ]  # fmt: skip
    assert [(g.model, g.stream) for g in found.table3] == [(m.name, "zipf") for m in MODELS]
    assert [(p.figure, p.sparsity, p.way) for p in found.figure4] == [
        (figure, sparsity, way) for figure in FIGURE4 for sparsity in SPARSITIES for way in WAYS
    ]
    assert [(c.figure, c.other) for c in found.crossings] == [
        (figure, way) for figure in FIGURE4 for way in WAYS[1:]
    ]
    names = [(model.name, ("RTX3090", "RTX2080")[gpu]) for model, gpu in STEPPED]
    assert len(names) == 7 and ("LM", "RTX2080") not in names
    assert [(s.model, s.gpu, s.workers, s.utilisation) for s in found.figure7] == [
        (*name, workers, share) for name in names for workers in WORKERS for share in UTILISATIONS
    ]


def test_table_2_for_gnmt(found: Rows) -> None:
    """26.0 MB on two nodes of four: 2 x 7 / 8 of them, and 14 start-ups."""
    o = {(o.workers, o.nodes, o.gradient, o.way): o for o in found.table2}
    row = o[8, 2, "original", "alltoall"]
    assert row.equation == pytest.approx(1.75 * 26 * MB / 12.5e9 + 14 * STARTUP, rel=1e-12)
    assert row.shared == pytest.approx(4 * 26 * MB / 12.5e9 + 14 * STARTUP, rel=1e-12)
    assert o[8, 2, "coalesced", "ps"].exact is None and row.exact is None
    tokens = round(12.2 * MB / 8192)  # of each of two tables
    exact = 2 * (28 * STARTUP + 7 * (8 + tokens * (4 + 2 * 1024 * 4 / 8)) / 12.5e9)
    assert o[8, 2, "coalesced", "alltoall"].exact == pytest.approx(exact, rel=1e-12)


def test_reductions_and_speeds_follow_from_the_rows(found: Rows) -> None:
    for g in found.table3:
        assert g.coalescing == pytest.approx(100 * (1 - g.coalesced / g.original), rel=1e-9)
        assert g.priority == pytest.approx(100 * (1 - g.prior / g.coalesced), rel=1e-9)
        assert g.own_prior < g.prior < g.coalesced < g.original
        assert g.priority < g.paper_priority < g.own_priority  # as the text says
    for s in found.figure7:
        assert s.best == min(s.baselines, key=lambda name: s.baselines[name])
        assert s.speedup == s.baselines[s.best] / s.embrace >= 1
        stalls = s.baselines[s.best] - s.compute, s.embrace - s.compute
        assert s.stall_ratio == stalls[0] / stalls[1] and stalls[1] > 0
        assert s.baselines["BytePS"] > s.baselines["Parallax"]


def test_done_is_called_as_often_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_speeds", lambda model, gpu: [])
    ticks: list[None] = []
    words = np.arange(2 * 16 * 12_288) % 1000
    made = rows(lambda: ticks.append(None), words)
    assert len(ticks) == TOTAL
    assert [g.stream for g in made.table3] == ["zipf", "corpus"] * 4
    assert {g.vocabulary for g in made.table3[1::2]} == {1000}
    assert made.table3[1].coalesced == LM.megabytes(1000) == made.table3[1].own_prior


def test_the_text(found: Rows) -> None:
    lines = text_of(found).splitlines()
    assert max(map(len, lines)) <= 100
    said = "\n".join(lines)
    assert " 8  2  all-to-all      3.91    8.82       1.89    4.19   2.19" in said
    assert "GNMT-8       paper                      26.0       12.2    5.8             53.1" in said
    assert "GNMT-8       zipf    3328 of 32320      26.0       12.1" in said
    assert "4a       40%       22.34   50.93       37.16  101.78       89.01" in said
    assert "4a      all-reduce  0 to 1       0.5625 to 1" in said
    assert "LM           RTX2080    1.99 to 2.41     -     -     -             -  not repro" in said
    assert "RTX3090  all          1.45 to 2.56" in said and "…" not in said
    for legend in ("original, coalesced:", "Tokens of", "paper:", "Assumed", "Why ours differ:"):
        assert any(line.startswith(legend) for line in lines)


def test_the_picture(found: Rows, tmp_path: Path) -> None:
    draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(found: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def known(done: object, words: np.ndarray | None = None) -> Rows:
        given.append(None if words is None else words.tolist())
        return found

    monkeypatch.setattr(tables, "rows", known)
    png, text = tmp_path / "a.png", tmp_path / "a.txt"
    text.write_text("a b a")
    done = command("simulate", "--embrace", "--corpus", str(text), "--png", str(png))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{text_of(found)}\n"
    assert png.exists() and done.stderr.split() == ["drawn:", str(png)]
    told = json.loads(command("simulate", "--embrace", "--json").stdout)
    assert told == json.loads(json.dumps(asdict(found)))
    assert given == [[0, 1, 0], None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dgx2", "--embrace"], "--embrace has its own clusters and sizes: leave out machine\n"),
        (["--embrace", "--gtopk"], "--gtopk has its own clusters and sizes: leave out --embrace\n"),
        (["--embrace", "--png", "a.svg"], "--png writes a file that ends in .png, not a.svg\n"),
        (["--embrace", "--corpus", "/nowhere/a"], "No such file or directory: '/nowhere/a'\n"),
        (["dgx2", "--corpus", "a.txt"], "--corpus is the text of --embrace: give that as well\n"),
        (
            ["dgx2", "-s", "1M", "--png", "a.png"],
            "figures of --gtopk or --embrace, or --train: give",
        ),
    ],
)
def test_what_does_not_go_together(words: list[str], said: str) -> None:
    done = command("simulate", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_corpus_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CollectiveError, match=r"a\.bin must be text in UTF-8"):
        read_words(path)
