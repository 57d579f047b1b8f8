"""The gTop-k paper's tables: equations by hand, what rows there are, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from linkweave.bench.reproduce import gtopk as tables
from linkweave.bench.reproduce.gtopk import (
    NUMEL,
    SCALE,
    SIZES,
    Rows,
    crossing_elements,
    crossover,
    dense,
    gtopk,
    rows,
    selection_seconds,
    simulated,
    topk,
    tree,
)
from linkweave.bench.reproduce.gtopk_figures import draw
from linkweave.bench.reproduce.gtopk_paper import (
    ALPHA,
    BETA,
    METHODS,
    MODELS,
    SCRIPT_ALPHA,
    WORKERS,
)
from linkweave.bench.reproduce.gtopk_tables import tables as text_of
from linkweave.collectives import overlap
from tests.cpu.commands import command


@pytest.fixture(scope="module")
def found() -> Rows:
    """All rows with a selection of 1 ns an element, and a plan twice as fast as the equation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "simulated", lambda workers, numel, k: gtopk(workers, k) / 2)
        return rows(select=lambda numel, k: numel * 1e-9)


@pytest.mark.parametrize(
    ("function", "workers", "count", "seconds"),
    [
        (dense, 1, 100, 0), (dense, 2, 100, 206), (dense, 4, 100, 318), (dense, 5, 100, 344),
        (topk, 1, 10, 0), (topk, 2, 10, 43), (topk, 4, 10, 126), (topk, 8, 10, 289),
        (gtopk, 1, 10, 0), (gtopk, 2, 10, 86), (gtopk, 4, 10, 172), (gtopk, 8, 10, 258),
        (tree, 1, 10, 0), (tree, 3, 10, 172), (tree, 5, 10, 258), (tree, 9, 10, 344),
    ],
)  # fmt: skip
def test_equations_by_hand(function: object, workers: int, count: int, seconds: float) -> None:
    """With alpha 3 and beta 2."""
    assert function(workers, count, 3.0, 2.0) == seconds  # type: ignore[operator]


def test_log2_is_rounded_up_only_in_the_tree() -> None:
    assert topk(6, 10, 1.0, 0.0) == pytest.approx(2.584962500721156, rel=1e-15)
    assert gtopk(6, 10, 1.0, 0.0) == pytest.approx(5.169925001442312, rel=1e-15)
    assert tree(6, 10, 1.0, 0.0) == 6
    assert all(tree(p, 1000) == gtopk(p, 1000) for p in (2, 4, 8, 64, 1024))


def test_the_papers_constants_give_the_papers_times() -> None:
    """100 MiB at density 0.001: k = 26,214, on 4 and 32 workers."""
    k = NUMEL // 1000
    assert (k, ALPHA, BETA) == (26_214, 0.436e-3, 3.6e-8)
    assert topk(4, k) == pytest.approx(2 * 0.436e-3 + 6 * k * 3.6e-8, rel=1e-15)
    assert gtopk(32, k) == pytest.approx(10 * 0.436e-3 + 20 * k * 3.6e-8, rel=1e-15)
    assert round(1e3 * gtopk(32, k), 1) == 23.2 and round(1e3 * topk(32, k), 1) == 60.7


def test_top_k_is_faster_for_few_workers() -> None:
    k = NUMEL // 1000
    assert topk(4, k) < gtopk(4, k) and topk(32, k) > 2 * gtopk(32, k)
    assert topk(7, k) < gtopk(7, k) and topk(8, k) > gtopk(8, k)
    assert topk(10, k) < tree(10, k) and topk(11, k) > tree(11, k)
    assert (crossover(gtopk, k), crossover(tree, k)) == (8, 11)
    assert crossover(gtopk, k, SCRIPT_ALPHA) == 10


@pytest.mark.parametrize("workers", [8, 32, 64])
def test_gtopk_is_faster_for_large_messages(workers: int) -> None:
    numel = crossing_elements(workers)
    assert gtopk(workers, numel // 1000 - 1) > topk(workers, numel // 1000 - 1)
    assert gtopk(workers, numel // 1000 + 1) < topk(workers, numel // 1000 + 1)


def test_top_k_is_always_faster_on_six_workers() -> None:
    with pytest.raises(ValueError, match="faster for 6 workers"):
        crossing_elements(6)
    assert topk(6, 10**9) < gtopk(6, 10**9) and topk(7, 10**9) > gtopk(7, 10**9)


def test_models_have_the_papers_sizes_and_speeds() -> None:
    sizes = {model.name: model.numel for model in MODELS}
    assert sizes["VGG-16"] == overlap.model("vgg16-cifar").nbytes // 4
    assert sizes["ResNet-50"] == overlap.model("resnet50").nbytes // 4
    widths = (3, 16, *[16] * 6, *[32] * 6, *[64] * 6)  # 3 x 3 and batch norm; a linear layer
    assert sizes["ResNet-20"] == 650 + sum(9 * a * b + 2 * b for a, b in zip(widths, widths[1:]))  # noqa: B905
    convolutions = ((3, 64, 121), (64, 192, 25), (192, 384, 9), (384, 256, 9), (256, 256, 9))
    linear = ((9216, 4096, 1), (4096, 4096, 1), (4096, 1000, 1))
    assert sizes["AlexNet"] == sum(a * b * n + b for a, b, n in convolutions + linear)
    for model in MODELS:
        for method in METHODS:
            speeds = model.throughput[method]
            assert len(speeds) == len(WORKERS) and speeds[0] == model.throughput["dense"][0]
            if (model.name, method) != ("VGG-16", "gtopk"):  # where the paper contradicts itself
                assert 32 * speeds[-1] == pytest.approx(model.printed[method], rel=0.013)
        step = model.compute + model.selection + model.communication
        assert model.batch / model.throughput["gtopk"][-1] == pytest.approx(step, rel=0.07)


def test_rows_are_complete(found: Rows) -> None:
    points = [(c.workers, c.numel) for c in found.figure9]
    assert points == [(p, NUMEL) for p in SCALE] + [(p, m) for p in (32, 64) for m in SIZES]
    assert [c.workers for c in found.figure9 if c.simulated is not None] == [4, 8, 16, 32]
    steps = [(s.model, s.method, s.workers) for s in found.figure10]
    assert steps == [(m.name, method, p) for m in MODELS for method in METHODS for p in WORKERS]
    assert [s.printed for s in found.figure10 if s.workers < 32] == [None] * 48
    assert [b.model for b in found.figure11] == [m.name for m in MODELS]
    assert found.crossovers == {"equations": 8, "tree": 11, "script": 10}


def test_a_step_is_iteration_selection_and_equation(found: Rows) -> None:
    rows = {(s.model, s.method, s.workers): s for s in found.figure10}
    model = MODELS[0]
    s = rows["VGG-16", "gtopk", 32]
    seconds = 0.097 + 0.091353 + gtopk(32, 14_728)
    assert s.throughput == pytest.approx(32 * 128 / seconds, rel=1e-12)
    assert s.efficiency == pytest.approx(0.097 / seconds, rel=1e-12)
    assert (s.measured, s.printed) == (pytest.approx(3942.4), 3020)
    assert s.measured_communication == pytest.approx(128 / 123.2 - 0.097 - 0.091353)
    s = rows["VGG-16", "dense", 4]
    assert s.communication == dense(4, model.numel)
    assert s.throughput == pytest.approx(4 * 128 / (0.097 + s.communication), rel=1e-12)
    for model in MODELS:
        one = rows[model.name, "topk", 1]
        assert (one.efficiency, one.measured_efficiency, one.communication) == (1, 1, 0)
        assert one.throughput == model.batch / model.iteration


def test_a_breakdown_tells_what_is_explained(found: Rows) -> None:
    parts = {b.model: b for b in found.figure11}
    b = parts["AlexNet"]
    assert (b.compute, b.measured_compute, b.selection) == (0.369, 0.257205, 61_100_840 * 1e-9)
    assert b.communication == gtopk(32, 61_100) and b.simulated == b.communication / 2
    assert b.wide - b.communication == pytest.approx(10 * 8 * 61_100 * 9e-9)  # 8 bytes an entry
    assert b.entries == pytest.approx(24 * 61_100 / 250e6)
    assert b.growing == pytest.approx((64 / 15.777 - 64 / 16.536) * 5 / 3)
    assert b.copies == pytest.approx((3.36298 - b.growing) * 250e6 / (4 * 61_100_840))
    assert parts["ResNet-20"].copies is None
    large = [parts[name].copies for name in ("VGG-16", "AlexNet", "ResNet-50")]
    assert [round(copies or 0, 1) for copies in large] == [3.0, 3.1, 3.0]


def test_done_is_called_as_often_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "simulated", lambda workers, numel, k: 1.0)
    ticks: list[None] = []
    rows(lambda: ticks.append(None), lambda numel, k: 1.0)
    assert len(ticks) == tables.TOTAL


def test_the_tree_planned_on_two_machines() -> None:
    """Up in one message, down in one: chunks gain nothing on one hop."""
    hop = 436e-6 + 8 * 100 / 111_111_000
    assert simulated(2, 100_000, 100) == pytest.approx(2 * hop, rel=1e-9)


def test_the_tree_planned_on_four_machines_is_no_slower_than_the_equation() -> None:
    assert simulated(4, NUMEL, NUMEL // 1000) <= gtopk(4, NUMEL // 1000)


def test_a_selection_is_measured() -> None:
    assert 1e-6 < selection_seconds(100_000, 100) < 1


def test_the_text(found: Rows) -> None:
    lines = text_of(found).splitlines()
    assert max(map(len, lines)) <= 100
    said = "\n".join(lines)
    assert " 32           25  1855.5   60.7    63.5  -2.8    23.2    28.9  -5.6   23.2" in said
    assert "gTop-k is faster than top-k at 100 MB from 8 workers on" in said
    assert "VGG-16     gTop-k     3020   3942  20146   +411%" in said
    assert "0.015 of 0.851 s" in said
    assert "AlexNet    compress     0.3838  0.0611" in said
    for legend in ("script:", "paper:", "printed:", "compute:", "measured:", "Why ours differ:"):
        assert any(line.startswith(legend) for line in lines)


def test_the_picture(found: Rows, tmp_path: Path) -> None:
    draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(found: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "rows", lambda done: found)
    png = tmp_path / "a.png"
    done = command("simulate", "--gtopk", "--png", str(png))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{text_of(found)}\n"
    assert png.exists() and done.stderr.split() == ["drawn:", str(png)]
    told = json.loads(command("simulate", "--gtopk", "--json").stdout)
    assert told == json.loads(json.dumps(asdict(found)))
    assert {name: len(told[name]) for name in ("figure9", "figure10", "figure11")} == {
        "figure9": 22, "figure10": 60, "figure11": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dgx2", "--gtopk"], "--gtopk has its own clusters and sizes: leave out machine\n"),
        (["--gtopk", "-s", "1M", "-a", "ring"], "leave out --size, --algorithm\n"),
        (["--gtopk", "--root", "0"], "leave out --root\n"),
        (["--gtopk", "--png", "a.svg"], "--png writes a file that ends in .png, not a.svg\n"),
        (["dgx2", "-s", "1M", "--png", "a.png"], "--png draws the figures of --gtopk"),
        (["dgx2"], "give the message's --size, such as 64M, or --train MODEL\n"),
    ],
)
def test_what_does_not_go_together(words: list[str], said: str) -> None:
    done = command("simulate", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
