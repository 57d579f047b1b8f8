"""The gTop-k paper's tables: equations by hand, and what rows there are."""

from __future__ import annotations

import pytest

from linkweave.bench.reproduce import gtopk as tables
from linkweave.bench.reproduce.gtopk import MODELS, NUMEL, WORKERS, dense, gtopk, passes, step, topk
from linkweave.collectives import overlap


@pytest.mark.parametrize(
    ("function", "workers", "count", "seconds"),
    [
        (dense, 1, 100, 0), (dense, 2, 100, 206), (dense, 4, 100, 318), (dense, 5, 100, 344),
        (topk, 1, 10, 0), (topk, 2, 10, 43), (topk, 4, 10, 126), (topk, 8, 10, 289),
        (gtopk, 1, 10, 0), (gtopk, 2, 10, 86), (gtopk, 4, 10, 172), (gtopk, 8, 10, 258),
    ],
)  # fmt: skip
def test_equations_by_hand(function: object, workers: int, count: int, seconds: float) -> None:
    """With alpha 3 and beta 2."""
    assert function(workers, count, 3.0, 2.0) == seconds  # type: ignore[operator]


def test_log2_is_not_rounded() -> None:
    assert topk(6, 10, 1.0, 0.0) == pytest.approx(2.584962500721156, rel=1e-15)
    assert gtopk(6, 10, 1.0, 0.0) == pytest.approx(5.169925001442312, rel=1e-15)


def test_top_k_is_faster_for_few_workers() -> None:
    k = NUMEL // 1000
    assert topk(4, k) < gtopk(4, k) and topk(32, k) > 2 * gtopk(32, k)
    assert topk(7, k) < gtopk(7, k) and topk(8, k) > gtopk(8, k)
    assert tables.first_faster() == 8


@pytest.mark.parametrize("workers", [8, 32, 64])
def test_gtopk_is_faster_for_large_messages(workers: int) -> None:
    numel = tables.crossing_elements(workers)
    assert gtopk(workers, numel // 1000 - 1) > topk(workers, numel // 1000 - 1)
    assert gtopk(workers, numel // 1000 + 1) < topk(workers, numel // 1000 + 1)


def test_top_k_is_always_faster_on_six_workers() -> None:
    with pytest.raises(ValueError, match="faster for 6 workers"):
        tables.crossing_elements(6)
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
        for method in tables.METHODS:
            speeds = model.throughput[method]
            assert len(speeds) == len(WORKERS) and speeds[0] == model.throughput["dense"][0]
            if (model.name, method) != ("VGG-16", "gtopk"):  # where the paper contradicts itself
                assert 32 * speeds[-1] == pytest.approx(model.printed[method], rel=0.013)
        for other, ratio in model.ratios.items():
            printed = model.printed["gtopk"] / model.printed[other]
            assert ratio == pytest.approx(printed, rel=0.05)


def test_a_step_is_iteration_selection_and_equation() -> None:
    model = MODELS[0]
    s = step(model, "gtopk", 32)
    seconds = 0.097 + 0.091353 + gtopk(32, 14_728)
    assert s.throughput == pytest.approx(32 * 128 / seconds, rel=1e-12)
    assert s.efficiency == pytest.approx(0.097 / seconds, rel=1e-12)
    s = step(model, "dense", 4)
    assert s.throughput == pytest.approx(4 * 128 / (0.097 + dense(4, model.numel)), rel=1e-12)
    for model in MODELS:
        one = step(model, "topk", 1)
        assert (one.efficiency, one.measured_efficiency) == (1, 1)
        assert one.throughput == model.batch / model.iteration


def test_what_does_not_grow_is_three_passes_over_pcie() -> None:
    vgg, resnet20, alexnet, resnet50 = MODELS
    growing = (64 / 15.777 - 64 / 16.536) * 5 / 3
    assert passes(alexnet) == pytest.approx((3.36298 - growing) * 250e6 / (4 * 61_100_840))
    assert passes(resnet20) is None
    assert [round(passes(model) or 0, 1) for model in (vgg, alexnet, resnet50)] == [3.0, 3.1, 3.0]


def test_rows_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "selection_seconds", lambda numel, k: numel * 1e-9)
    monkeypatch.setattr(tables, "planned", lambda workers, numel, k: gtopk(workers, k) / 2)
    part = tables.scaling()
    found = {(row.item, row.what): row.ours for row in part.rows}
    assert len(found) == len(part.rows) == 37
    assert found["figure 9, left", "linkweave's planned tree on 32 workers, over equation 7"] == 0.5
    images = found["table VII", "AlexNet, gTop-k: images/s of 32 workers"]
    assert images == step(MODELS[2], "gtopk", 32).throughput
    assert found["figure 11", "AlexNet: selection, ms"] == pytest.approx(61.10084)
    efficiency, seconds = part.plots
    assert [len(line.x) for line in efficiency.series] == [len(WORKERS)] * 6
    assert seconds.series[2].y == tuple(gtopk(p, NUMEL // 1000) for p in tables.SCALE)


def test_the_tree_planned_on_two_machines() -> None:
    """Up in one message, down in one: chunks gain nothing on one hop."""
    hop = 436e-6 + 8 * 100 / 111_111_000
    assert tables.planned(2, 100_000, 100) == pytest.approx(2 * hop, rel=1e-9)


def test_the_tree_planned_on_four_machines_is_no_slower_than_the_equation() -> None:
    assert tables.planned(4, NUMEL, NUMEL // 1000) <= gtopk(4, NUMEL // 1000)


def test_a_selection_is_measured() -> None:
    assert 1e-6 < tables.selection_seconds(100_000, 100) < 1
