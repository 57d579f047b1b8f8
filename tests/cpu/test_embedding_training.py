"""A `ShardedEmbedding` trains as `nn.Embedding` in one process, with `prefetch` and without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from embedding_training import SPARSE, WIDTH, WORDS, Pair, built, imported, lstm, plain, transformer
from test_distributed import run
from training_models import apart, same

import linkweave
from linkweave import ShardedEmbedding, collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.training.embedding import sharded
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
MODELS = {"lstm": lstm, "transformer": transformer}
EVERY = [(name, kind) for name in MODELS for kind in (*SPARSE, "one")]


def as_one_process(rank: int, cases: Sequence[tuple[str, str]], steps: int) -> None:
    for name, kind in cases:
        states = []
        for ahead in (True, False):
            pair = Pair(kind, MODELS[name])
            pair.train(*range(steps), ahead=ahead)
            states.append(pair.close())
        assert same(*states), (name, kind)
        before = built(MODELS[name], plain).state_dict()
        assert apart(states[0], before) > 0.01


@pytest.mark.parametrize(
    ("size", "cases", "steps"),
    [
        (1, EVERY[::3], 3), (2, EVERY, 4), (3, EVERY[1::3], 4),
        *[pytest.param(size, EVERY, 100, marks=pytest.mark.slow) for size in (1, 2, 3, 5, 8)],
    ],
)  # fmt: skip
def test_training_is_that_of_one_process(
    size: int, cases: list[tuple[str, str]], steps: int
) -> None:
    """Eight ranks have five columns: some have none."""
    collectives.spawn(as_one_process, size, args=(cases, steps), timeout=60)


@on_ranks(2)
def test_the_model_is_an_embedding(rank: int) -> None:
    whole = torch.nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
    torch.nn.init.constant_(whole.weight, 0.5)
    mine = ShardedEmbedding(WORDS, WIDTH, dtype=torch.float64)
    mine.load_state_dict(whole.state_dict())
    optimizer = torch.optim.SGD(mine.parameters(), 0.25)
    with linkweave.DataParallel(mine, optimizer) as model:
        for step in range(3):
            ids = torch.tensor([step, 2 * step + 1])
            model(ids + rank).sum().backward()
            optimizer.step()
            with torch.no_grad():  # the mean of both ranks' gradients
                for word in (step, step + 1, 2 * step + 1, 2 * step + 2):
                    whole.weight[word] -= 0.125
            optimizer.zero_grad()
        assert torch.equal(model.module.state_dict()["weight"], whole.weight)


@on_ranks(2, order="fixed")
def test_schedules_change_nothing(rank: int) -> None:
    states = []
    for policy, chained in product(("c-cube", "us-byte", "wfbp", "asc-wfbp"), (True, False)):
        pair = Pair("sparse adam", lstm, chained, policy)
        pair.train(*range(4))
        assert pair.model.program.chained == chained
        states.append((policy, any(op.streamed for op in pair.model.program.ops), pair.close()))
    assert all(same(state, states[0][2]) for _, _, state in states)
    assert {policy for policy, streamed, _ in states if streamed} == {"c-cube"}


@on_ranks(2)
def test_schedules_that_are_measured(rank: int) -> None:
    for name in ("auto", "c-cube"):
        pair = Pair("adagrad", schedule=name)
        pair.train(*range(24))
        assert pair.model.schedule is not None
        pair.close()


@on_ranks(3)
def test_float32(rank: int) -> None:
    states = []
    for ahead in (True, False):
        pair = Pair("sparse adam", lstm, dtype=torch.float32)
        pair.train(*range(8), ahead=ahead)
        states.append(pair.check(within=1e-4))
        assert pair.inner.words(torch.tensor([1])).dtype == torch.float32
        pair.end()
    assert same(*states)


# ---- initial values ------------------------------------------------------------------------------
@on_ranks(1, 2, 7)
def test_initial_values_are_those_of_one_process(rank: int) -> None:
    found, want = built(lstm, ShardedEmbedding), built(lstm, plain)
    assert same(found.state_dict(), want.state_dict())
    first, stop = found.words.columns
    assert torch.equal(found.words.weight, want.words.weight[:, first:stop])


@pytest.mark.parametrize("rows", [64, 65, 70, 127, 128, 129, 199])
def test_initial_values_of_a_table_that_is_drawn_in_parts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch draws the last 16 values of a tensor anew."""
    monkeypatch.setattr(sharded, "DRAWN", 64)
    for width in (1, 2, 5):
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(1)
            mine = ShardedEmbedding(rows, width, dtype=dtype)
            torch.manual_seed(1)
            assert torch.equal(mine.weight, torch.nn.Embedding(rows, width, dtype=dtype).weight)


def test_names() -> None:
    assert linkweave.ShardedEmbedding is collectives.ShardedEmbedding is ShardedEmbedding
    assert linkweave.prefetch is collectives.prefetch
    assert {"ShardedEmbedding", "prefetch"} <= {*dir(linkweave)}
    shown = repr(ShardedEmbedding(WORDS, WIDTH, -1))
    assert shown == f"ShardedEmbedding({WORDS}, 5, padding_idx={WORDS - 1}, columns 0 to 4)"


def of_other_ranks(rank: int, table: list[list[int]], model: list[list[int]]) -> None:
    def mine(parts: list[list[int]]) -> Any:
        groups = [torch.distributed.new_group(part) for part in parts]
        return next(g for g, part in zip(groups, parts, strict=True) if rank in part)

    words = ShardedEmbedding(6, 4, group=mine(table))
    optimizer = torch.optim.SGD(words.parameters(), 0.1)
    with pytest.raises(CollectiveError, match="is of other ranks than this DataParallel"):
        linkweave.DataParallel(torch.nn.Sequential(words), optimizer, group=mine(model))


@pytest.mark.parametrize(
    ("table", "model"),
    [([[0, 1], [2, 3]], [[0, 1, 2, 3]]), ([[0, 1, 2, 3]], [[0, 1], [2, 3]]),
     ([[0, 2], [1, 3]], [[0, 1], [2, 3]])],
)  # fmt: skip
def test_an_embedding_of_other_ranks_is_refused(table: Any, model: Any) -> None:
    run(4, lambda rank: of_other_ranks(rank, table, model), backend="gloo")
