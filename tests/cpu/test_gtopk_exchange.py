"""The exchange of gTop-k: nothing is lost, the bytes on the wire, choices of modes, arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ThreadTransport, on_threads

from linkweave import GTopK
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import Network
from linkweave.collectives.overlap.network import sparse_seconds
from linkweave.collectives.training.gtopk.exchange import SparseAverage
from linkweave.collectives.training.gtopk.options import KEY, kept_in, resharded
from linkweave.kernels.gtopk.cpu import entries


@dataclass(frozen=True)
class Case:
    size: int
    counts: tuple[int, ...]
    density: float
    mode: str
    steps: int

    @property
    def shares(self) -> list[int]:
        return [max(1, round(self.density * n)) for n in self.counts]


def case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    sizes = (1, 2, 7, 31, 64, 101, 257, 1000)
    counts = tuple(int(rng.choice(sizes)) for _ in range(rng.integers(1, 4)))
    return Case(
        1 + seed % 17, counts, float(rng.choice([1 / sum(counts), 0.01, 0.1, 0.5, 1.0])),
        ("gtopk", "topk", "dense")[seed % 3], int(rng.integers(2, 6)),
    )  # fmt: skip


def options(mode: str, density: float) -> GTopK:
    """A dense exchange is one that sends all."""
    dense = mode == "dense"
    return GTopK(1.0 if dense else density, mode="auto" if dense else mode, conserve=True)


def train(case: Case, seed: int, exact: bool, transport: ThreadTransport) -> list[Any]:
    """(residual, what was sent, sum of gradients) after each step."""
    n, rank = sum(case.counts), transport.rank
    rng = np.random.default_rng([seed, rank])
    average = SparseAverage(transport, options(case.mode, case.density))
    residual = torch.zeros(n)
    added, sent, found = np.zeros(n), np.zeros(n), []
    for _ in range(case.steps):
        g = rng.standard_normal(n).astype(np.float32)
        if exact:  # and divisible by the number of ranks, as averages are exact
            g = np.round(g * 3).astype(np.float32) * case.size
        x = torch.from_numpy(g.copy())
        result = average(0, x, residual, case.counts, 0)
        added += g
        if result.found is None:
            sent += x.numpy().astype(np.float64) * case.size
        else:
            sums, where = entries(result.found)
            assert (np.diff(where) > 0).all()
            sent[where] += sums
            want = np.zeros(n, np.float32)
            want[where] = sums / np.float32(case.size) + np.float32(0)
            assert x.numpy().tobytes() == want.tobytes()
        assert result.fine
        kept = 0 if result.found is None else len(sums)
        found.append((residual.numpy().astype(np.float64), sent.copy(), added.copy(), kept))
    return found


@pytest.mark.parametrize("seed", range(102))
def test_residuals_and_what_was_sent_add_up_to_all_gradients(seed: int) -> None:
    """Exactly, after every step; and every rank has the same result."""
    one = case(seed)
    ranks, _ = on_threads(one.size, partial(train, one, seed, True))
    for rows in zip(*ranks, strict=True):
        assert all(row[1].tobytes() == rows[0][1].tobytes() for row in rows)
        if one.mode == "gtopk":
            assert rows[0][3] <= sum(one.shares)
        total = np.sum([row[0] for row in rows], axis=0) + rows[0][1]
        assert total.tolist() == np.sum([row[2] for row in rows], axis=0).tolist()
        if one.mode == "dense":
            assert not any(row[0].any() for row in rows)


@pytest.mark.parametrize("size", range(1, 18))
def test_bytes_on_the_wire(size: int) -> None:
    n, k = 400, 20
    for mode in ("gtopk", "topk"):
        one = Case(size, (n // 2, n // 2), k / n, mode, 3)
        _, (hub, *_) = on_threads(size, partial(train, one, 1, False))
        message = 8 * k
        up, down = [("send", message)] * (size - 1), [("broadcast", message)] * (size - 1)
        every = [("gather", message)] * (size * (size - 1))
        want = one.steps * (up + down if mode == "gtopk" else every)
        assert sorted(hub.messages) == sorted(want)


@pytest.mark.parametrize("mode", ["gtopk", "topk", "dense"])
def test_finite_gradients_whose_sum_is_not_are_no_error(mode: str) -> None:
    """The sum over elements only tells whether a closer look is needed."""

    def body(transport: ThreadTransport) -> list[float]:
        x = torch.full((4,), 3e38 / transport.size)
        x *= torch.tensor([1.0, 1.0, 1.0, -1.0])
        result = SparseAverage(transport, options(mode, 1.0))(0, x, torch.zeros(4), [4], 0)
        assert result.fine
        assert x.isfinite().all()
        return x.tolist()

    rows, _ = on_threads(2, body)
    assert rows[0] == rows[1] == (torch.tensor([1.5e38] * 3 + [-1.5e38])).tolist()


@pytest.mark.parametrize("mode", ["gtopk", "topk", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_16_bits_cannot_hold_stays_in_the_residual(dtype: torch.dtype, mode: str) -> None:
    """A residual of many steps may exceed the gradients' dtype."""

    def body(transport: ThreadTransport) -> tuple[list[float], list[float], int]:
        residual = torch.tensor([257.0, -1.0, 65504.0, 0.5])
        x = torch.tensor([0.0, 0.0, 65504.0, 0.0]).to(dtype)
        result = SparseAverage(transport, options(mode, 1.0))(0, x, residual, [4], 0)
        return x.tolist(), residual.tolist(), result.bad().numel()

    rows, _ = on_threads(2, body)
    for x, residual, bad in rows:
        assert bad == 0
        assert np.isfinite(x).all()
        assert np.isfinite(residual).all()
        if mode == "dense":
            given = [257.0, -1.0, 65504.0 + float(torch.tensor(65504.0, dtype=dtype)), 0.5]
            assert [a + b for a, b in zip(x, residual, strict=True)] == given


# ---- a selection of one's own ------------------------------------------------------------------
def every_other(sums: torch.Tensor, k: int, step: int) -> torch.Tensor:
    """Positions in no order, the same on all ranks."""
    return (2 * torch.arange(k).flip(0) + step) % len(sums)


def selected(mode: str, transport: ThreadTransport) -> list[Any]:
    counts, rank = [7, 9], transport.rank
    average = SparseAverage(transport, GTopK(0.25, mode=mode, select=every_other))
    residual, found = torch.zeros(16), []
    for step in range(3):
        x = torch.arange(16.0) * (rank + 1) * transport.size
        x[12] = math.nan if (step, rank) == (2, 1) else x[12]
        sent = average(0, x, residual, counts, step)
        found.append((x.tolist(), residual.tolist(), bool(sent.fine)))
    return found


@pytest.mark.parametrize("mode", ["gtopk", "topk"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_a_function_selects_is_sent(mode: str, size: int) -> None:
    rows, _ = on_threads(size, partial(selected, mode))
    kept, every = np.zeros(16), size * (size + 1) // 2  # kept: of rank 0's gradients
    for step in range(2):
        there = [(2 * i + step) % n + first for n, first in ((7, 0), (9, 7)) for i in range(2)]
        kept += np.arange(16) * size
        want = np.zeros(16)
        want[there] = kept[there] / size * every
        kept[there] = 0
        for rank, row in enumerate(rows):
            average, residual, fine = row[step]
            assert fine and average == want.tolist()
            assert residual == (kept * (rank + 1)).tolist()
    for average, _, fine in (row[2] for row in rows):
        assert not fine and math.isnan(average[12])  # which nobody had selected


@pytest.mark.parametrize(
    ("select", "words"),
    [
        (lambda sums, k, step: torch.zeros(k), r"integers \[4\] on cpu, not torch.float32 \[4\]"),
        (lambda sums, k, step: torch.arange(k + 1), r"not torch.int64 \[5\] on cpu"),
        (lambda sums, k, step: [*range(k)], r"not \[0, 1, 2, 3\]"),
        (lambda sums, k, step: torch.arange(k) - 1, "returned position -1 of 16 entries"),
        (lambda sums, k, step: torch.arange(k) + 13, "returned position 16 of 16 entries"),
    ],
)
def test_a_bad_selection_is_refused(select: Any, words: str) -> None:
    transport = ThreadTransport(on_threads(1, lambda _: None)[1], 0)
    average = SparseAverage(transport, GTopK(0.25, select=select, mode="gtopk"))
    with pytest.raises(CollectiveError, match=words):
        average(0, torch.ones(16), torch.zeros(16), [16], 0)


def test_what_is_selected_twice_is_sent_once() -> None:
    def body(transport: ThreadTransport) -> list[float]:
        spec = GTopK(0.5, select=lambda sums, k, step: torch.tensor([1, 0, 1, 1][:k]), mode="gtopk")
        x, residual = torch.full((16,), float(transport.rank + 1)), torch.zeros(16)
        SparseAverage(transport, spec)(0, x, residual, [8, 8], 0)
        assert residual.tolist() == ([0.0] * 2 + [transport.rank + 1.0] * 6) * 2
        return x.tolist()

    rows, _ = on_threads(2, body)
    assert rows == [([1.5] * 2 + [0.0] * 6) * 2] * 2


def test_ranks_with_the_same_function_have_the_same_options() -> None:
    assert repr(GTopK(select=every_other)).endswith("conserve=False, select=every_other)")


# ---- times and modes -----------------------------------------------------------------------------
def test_seconds_of_each_mode() -> None:
    """Equations 5 to 7 of the paper with alpha = 1 ms and beta = 1 us a byte, by hand."""
    for size, rounds in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        alpha, beta, nbytes, k = 1e-3, 1e-6, 40_000, 10
        steps = 2 * (size - 1)
        network = Network(steps * alpha, steps / size * beta, workers=size)
        want = {
            "gtopk": 2 * rounds * (alpha + 80 * beta),
            "topk": rounds * alpha + (size - 1) * 80 * beta,
            "dense": steps * (alpha + nbytes / size * beta),
        }
        found = sparse_seconds(network, nbytes, k)
        assert found == pytest.approx(want, rel=1e-12)


def test_the_fastest_mode_is_chosen() -> None:
    auto = SparseAverage(ThreadTransport(on_threads(32, lambda _: None)[1], 0), GTopK())
    auto.network = Network(62 * 0.436e-3, 62 / 32 * 9e-9, workers=32)  # of the paper: 1 Gbit/s
    n = 25 << 20
    assert auto.choose(4 * n, n // 1000, n) == "gtopk"
    assert auto.choose(4 * n, n // 2, n) == "dense"
    auto.network = Network(2 * 0.436e-3, 9e-9, workers=2)  # as many bytes with two ranks, in
    assert auto.choose(4 * n, n // 1000, n) == "topk"  # half as many rounds
    one = SparseAverage(ThreadTransport(on_threads(1, lambda _: None)[1], 0), GTopK(mode="gtopk"))
    assert one.choose(8, 1, 2) == "gtopk"
    assert one.choose(8, 2, 2) == "dense"  # to the bit what training without it sends


# ---- what users choose ---------------------------------------------------------------------------
def test_densities_of_the_warm_up() -> None:
    spec = GTopK(0.001, warmup=(0.25, 0.0725, 0.015, 0.004), epoch_steps=3)
    found = [spec.density_at(step) for step in range(15)]
    assert found == [0.25] * 3 + [0.0725] * 3 + [0.015] * 3 + [0.004] * 3 + [0.001] * 3
    higher = GTopK(0.1, warmup=(0.25, 0.0725), epoch_steps=3)
    assert [higher.density_at(step) for step in range(9)] == [0.25] * 3 + [0.1] * 6
    assert [GTopK().density_at(step) for step in (0, 10**9)] == [0.001] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"density": 0}, "a density must be above 0, not 0"),
        ({"density": 1.5}, "a density must be"),
        ({"density": math.nan}, "a density must be"),
        ({"density": "0.1"}, "a density must be"),
        ({"warmup": (0.1, -0.1)}, "a density must be"),
        ({"epoch_steps": 0}, "epoch_steps must be an integer from 1"),
        ({"epoch_steps": 1.5}, "epoch_steps must be an integer from 1"),
        ({"conserve": "yes"}, "conserve must be True or False, not 'yes'"),
        ({"per": "layer"}, "per must be bucket or unit, not 'layer'"),
        ({"mode": "dense"}, "mode must be gtopk or topk or auto, not 'dense'"),
        ({"select": "random"}, "select must be a function or None, not 'random'"),
        ({"mode": ["gtopk"]}, "mode must be gtopk or topk or auto, not a list of 1 items"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        GTopK(**changes)
    assert words in str(caught.value)


# ---- states of other numbers of ranks ------------------------------------------------------------
def states(size: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(size)

    def parts() -> dict[str, torch.Tensor]:
        shapes = {"a.weight": (3, 5), "a.bias": (3,), "one": ()}
        made = {name: rng.integers(-99, 99, shape) for name, shape in shapes.items()}
        return {name: torch.tensor(x, dtype=torch.float32) for name, x in made.items()}

    return [
        {"state": {}, "param_groups": [{
            "lr": 0.1, "params": [0, 1, 2],
            KEY: {f"rank {rank} of {size}": {"steps": 7, "residual": parts()}},
        }]}
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (1, 4), (2, 2), (5, 2), (2, 5)])
def test_the_sum_of_residuals_stays_when_the_number_of_ranks_changes(old: int, new: int) -> None:
    before = states(old)
    copies = [{k: v.clone() for k, v in kept_in(one)["residual"].items()} for one in before]
    after = resharded(before, new)
    ranks = [(kept_in(one)["rank"], kept_in(one)["size"]) for one in after]
    assert ranks == [(r, new) for r in range(new)]
    assert all(kept_in(one)["steps"] == 7 and one["param_groups"][0]["lr"] == 0.1 for one in after)
    names = kept_in(before[0])["residual"].keys()
    assert all(kept_in(one)["residual"].keys() == names for one in after)
    for name in names:
        sums = [sum(kept_in(one)["residual"][name] for one in every) for every in (before, after)]
        assert torch.equal(*sums)
    assert all(
        torch.equal(kept_in(one)["residual"][name], copy[name])
        for one, copy in zip(before, copies, strict=True) for name in copy
    )  # fmt: skip


@pytest.mark.parametrize("given", ["none", "missing", "twice", "disorder", "dense"])
def test_resharding_needs_all_states_in_order(given: str) -> None:
    found = states(3)
    chosen = {
        "none": [], "missing": found[:2], "twice": [*found[:2], found[1]],
        "disorder": found[::-1], "dense": [{"state": {}, "param_groups": [{}]}] * 3,
    }  # fmt: skip
    with pytest.raises(CollectiveError, match="the state_dicts of all ranks in order"):
        resharded(chosen[given], 2)
    with pytest.raises(CollectiveError, match="size must be an integer from 1"):
        resharded(found, 0)
