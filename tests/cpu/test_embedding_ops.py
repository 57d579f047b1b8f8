"""What the steps of a `ShardedEmbedding` send, in which order: the ops, and each byte of them.

Ranks are threads, over transports that count what arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedding_training import (
    WIDTH,
    WORDS,
    Linear,
    Pair,
    imported,
    schedule,
    sentences,
    share,
    stepped,
)
from thread_ranks import ThreadTransport, on_threads
from torch import nn

from linkweave import DataParallel, ShardedEmbedding, prefetch
from linkweave.collectives.overlap import Network, embedding_ways
from linkweave.collectives.training.embedding.exchange import columns_of
from linkweave.collectives.training.embedding.optimizer import RowOptimizer
from linkweave.collectives.training.embedding.schedule import prior_rows
from linkweave.collectives.training.stepping import stepper_of
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
STEPS = 3
ALONE = threading.Lock()
"""While a rank draws initial values by the generator of all."""


def rows_of(step: int, size: int) -> list[torch.Tensor]:
    """The rows that each rank needs in a step; none after the last one."""
    if step == STEPS:
        return [torch.empty(0, dtype=torch.int64)] * size
    return [share(sentences(step), rank, size)[0].unique() for rank in range(size)]


class Bytes:
    """What a rank sends to the others, in float64, by the rows that each rank needs."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.others = rank, size - 1
        self.widths = columns_of(WIDTH, size)

    def tokens(self, rows: list[torch.Tensor]) -> int:
        return 8 * self.others + 4 * len(rows[self.rank]) * self.others

    def lookup(self, rows: list[torch.Tensor]) -> int:
        """This rank's columns of the rows of all others."""
        others = sum(map(len, rows)) - len(rows[self.rank])
        return 8 * others * self.widths[self.rank]

    def gradients(self, rows: torch.Tensor) -> int:
        """Of rows of this rank, in the columns of all others."""
        return 8 * len(rows) * (WIDTH - self.widths[self.rank])


def expected(rank: int, size: int, ahead: bool) -> list[tuple[str, int]]:
    """The ops of a rank and their bytes."""
    sent = Bytes(rank, size)
    found: list[tuple[str, int]] = []
    for step in range(STEPS):
        rows, following = rows_of(step, size), rows_of(step + 1, size)
        if not ahead or step == 0:
            found += [("tokens", sent.tokens(rows)), ("lookup", sent.lookup(rows))]
        mine, needed = rows[rank], torch.cat(following)
        if not ahead or step == STEPS - 1:  # nobody knows the next tokens
            needed = mine
            if ahead:
                found += [("no tokens", 8 * (size - 1))]
        else:
            found += [("tokens", sent.tokens(following))]
        prior = torch.isin(mine, needed)
        found += [("prior", sent.gradients(mine[prior])), ("update prior", 0)]
        if ahead:
            found += [("lookup", sent.lookup(following))]
        found += [("delayed", sent.gradients(mine[~prior]))]
    return found


@contextmanager
def trained(
    dense: ThreadTransport, rows: ThreadTransport, ahead: bool
) -> Iterator[tuple[ShardedEmbedding, Any]]:
    """After some steps of this rank."""
    with ALONE:
        torch.manual_seed(3)
        embedding = ShardedEmbedding(WORDS, WIDTH, group=rows, dtype=torch.float64)
        inner = Linear(embedding).double()
    optimizers = [
        torch.optim.SGD(inner.last.parameters(), 0.1), torch.optim.SGD([embedding.weight], 0.5)
    ]  # fmt: skip
    plan = schedule(policy="wfbp", chained=False)
    model = DataParallel(inner, optimizers, schedule=plan, group=dense)
    batches = [share(sentences(step), dense.rank, dense.size) for step in range(STEPS)]
    for batch in prefetch(batches) if ahead else batches:
        stepped(batch, model, optimizers)
    model.finish()
    yield embedding, model
    model.close()
    embedding.close()


def ops_of(dense: ThreadTransport, rows: ThreadTransport, ahead: bool) -> list[tuple[str, int]]:
    with trained(dense, rows, ahead) as (embedding, _):
        found = embedding.ops
        assert all(op.start <= op.end for op in found)
        assert all(a.end <= b.start for a, b in zip(found, found[1:], strict=False))
        return [(op.name, op.nbytes) for op in found]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_ops_and_their_bytes(size: int, ahead: bool) -> None:
    """Seven ranks have five columns."""
    found, hubs = on_threads(size, partial(ops_of, ahead=ahead), transports=2)
    assert found == [expected(rank, size, ahead) for rank in range(size)]
    arrived = [nbytes for hub in hubs[3:] for call, nbytes in hub.messages if call == "alltoall"]
    assert sum(arrived) == sum(nbytes for ops in found for _, nbytes in ops)
    assert not any(call == "alltoall" for hub in hubs[:3] for call, _ in hub.messages)


def test_prior_rows() -> None:
    """Those that any rank needs next (algorithm 1), in any call; all of them if nobody knows."""
    tokens = [torch.tensor([0, 2, 5, 7]), torch.tensor([2, 3]), torch.empty(0, dtype=torch.int64)]
    calls = [[torch.tensor([5]), torch.tensor([9]), torch.tensor([3, 4])],
             [torch.tensor([0]), torch.tensor([1]), torch.tensor([1])]]  # fmt: skip
    first = [[False, False, True, False], [False, True], []]
    both = [[True, False, True, False], [False, True], []]
    assert [mask.tolist() for mask in prior_rows(tokens, calls[:1])] == first
    assert [mask.tolist() for mask in prior_rows(tokens, calls)] == both
    assert [mask.tolist() for mask in prior_rows(tokens, [None, calls[0]])] == first
    for unknown in ([], [None], [None, None]):
        assert all(mask.all() for mask in prior_rows(tokens, unknown))


# ---- beside dense gradients ----------------------------------------------------------------------
@on_ranks(2)
def test_the_order_under_a_chained_schedule(rank: int) -> None:
    """Delayed rows and the next tokens travel beside the passes, prior rows before dense ops."""
    pair = Pair()
    pair.train(*range(4))
    pair.model.finish()
    names = [op.name for op in pair.embeddings[0].ops]
    assert names == [
        "tokens", "lookup", *["tokens", "prior", "update prior", "lookup", "delayed"] * 3,
        "no tokens", "prior", "update prior", "lookup", "delayed",
    ]  # fmt: skip
    pair.close()


@on_ranks(2)
def test_a_rank_may_wait_for_dense_gradients(rank: int) -> None:
    """Meanwhile the others wait for its next forward pass."""
    for ahead in (True, False):
        pair = Pair()
        for mine, _ in pair.batches(range(4), ahead):
            stepped(mine, pair.model, pair.optimizers, 2)
            if rank == 0:
                pair.model.finish()
        pair.end()


def test_columns() -> None:
    assert columns_of(5, 3) == [2, 2, 1]
    assert columns_of(2, 4) == [1, 1, 0, 0]
    assert [sum(columns_of(WIDTH, size)) for size in range(1, 9)] == [WIDTH] * 8


@on_ranks(2, 4)
def test_as_many_bytes_as_predicted(rank: int, size: int) -> None:
    """By a rank with 10 distinct rows of 100 x 8 float32."""
    table = ShardedEmbedding(100, 8)
    model = nn.Sequential(table, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trained = DataParallel(model, optimizer, schedule="wfbp")
    trained(torch.arange(10) * (rank + 1)).sum().backward()
    optimizer.step()
    trained.close()
    ways = embedding_ways(Network(0.0, 1.0, workers=size), 100, 8, 10)
    (predicted,) = (way.nbytes for way in ways if way.name == "alltoall")
    assert sum(op.nbytes for op in table.ops) == predicted
    table.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_a_step_of_rows_completes_no_step_of_layers(kind: Any) -> None:
    """Layers of a chained schedule are updated before their next use, by the same optimizer too."""

    def body(transport: ThreadTransport) -> list[str]:
        table = ShardedEmbedding(9, 4, group=transport)
        optimizer = kind([table.weight], lr=0.1)
        completed: list[str] = []
        rows, put_off = RowOptimizer(optimizer, [table]), lambda: completed.append("completed")
        stepper_of(optimizer).engines.append(
            SimpleNamespace(complete=put_off, synchronize=lambda: None)  # type: ignore[arg-type]
        )
        schedule: Any = table.schedule
        schedule.on_gradient = lambda: None  # as `DataParallel` listens
        schedule.look_up(torch.tensor([1, 2]), True).sum().backward()
        schedule.end_backward()
        rows.step()
        schedule.finish()
        table.close()
        return completed

    assert on_threads(2, body)[0] == [[], []]
