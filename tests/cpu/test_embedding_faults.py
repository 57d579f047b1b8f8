"""What a `ShardedEmbedding` refuses, ranks that fail, and groups of torch.distributed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedding_training import (
    SPARSE,
    WIDTH,
    WORDS,
    Linear,
    Pair,
    built,
    imported,
    linear,
    loss_of,
    lstm,
    optimizers_for,
    schedule,
    sentences,
    share,
    stepped,
)
from machines import on_group
from torch import nn
from training_models import error_of, same

from linkweave import ShardedEmbedding, collectives, prefetch
from linkweave.collectives import CollectiveError, DataParallel
from linkweave.collectives.training.embedding.exchange import RowExchange
from tests.cpu.helpers import outlive
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
SGD = torch.optim.SGD


@on_ranks(2)
def test_it_is_not_trained_outside_data_parallel(rank: int) -> None:
    words = ShardedEmbedding(5, 4)
    rows = words(torch.tensor([rank]))
    assert "gradients that nobody sends: wrap the model" in error_of(rows.sum().backward)


# ---- arguments -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 3), {}, "num_embeddings must be"), ((3, 0), {}, "embedding_dim must be"),
        ((3.5, 2), {}, "num_embeddings must be"), ((3, 2, 3), {}, "padding_idx must be"),
        ((3, 2, -4), {}, "padding_idx must be"), ((3, 2, 0.5), {}, "padding_idx must be"),
        ((3, 2), {"max_norm": 1.0}, "does not have max_norm: use nn.Embedding"),
        ((3, 2), {"scale_grad_by_freq": True}, "does not have scale_grad_by_freq: use nn.Emb"),
        ((3, 2), {"sparse": False}, "does not have sparse=False: use nn.Embedding"),
        ((3, 2), {"dtype": torch.float16}, "or torch.float64, not torch.float16"),
        ((3, 2), {"group": 3}, "group must be a Communicator or a ProcessGroup of torch.dist"),
    ],
)  # fmt: skip
def test_arguments(arguments: Any, options: Any, words: str) -> None:
    assert words in error_of(lambda: ShardedEmbedding(*arguments, **options))


def test_pretrained_tables() -> None:
    said = error_of(lambda: ShardedEmbedding.from_pretrained(torch.zeros(3)))
    assert "embeddings must have two dimensions, not shape (3,)" in said
    said = error_of(lambda: ShardedEmbedding.from_pretrained(torch.zeros(3, 2, dtype=torch.int64)))
    assert "dtype must be torch.float32 or torch.float64, not torch.int64" in said


INDICES: list[tuple[Any, str]] = [
    (torch.tensor([0, WORDS]), f"ids must be from 0 to {WORDS - 1}; one is {WORDS}"),
    (torch.tensor([0, -1]), f"ids must be from 0 to {WORDS - 1}; one is -1"),
    (torch.tensor([0.0]), "ids must be a tensor of int32 or int64, not torch.float32"),
    (torch.tensor([True]), "ids must be a tensor of int32 or int64, not torch.bool"),
    ([0, 1], "ids must be a tensor of int32 or int64, not"),
    (torch.tensor([0], device="meta"), "ids must be on cpu as the weight, not on meta"),
]


@pytest.mark.parametrize(("ids", "words"), INDICES)
def test_indices_on_a_single_rank(ids: Any, words: str) -> None:
    assert words in error_of(lambda: ShardedEmbedding(WORDS, WIDTH)(ids))


# ---- optimizers ----------------------------------------------------------------------------------
@on_ranks(2)
def test_optimizers_and_models(rank: int) -> None:
    def said(optimizers: Callable[[nn.Module], Any], make: Any = linear) -> str:
        inner = built(make, ShardedEmbedding)
        return error_of(lambda: DataParallel(inner, optimizers(inner)))

    def dense(inner: nn.Module) -> SGD:
        return SGD(inner.last.parameters(), 0.1)

    words = "a ShardedEmbedding is trained by one of SGD, Adagrad, SparseAdam, not by {}: pass Data"
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        assert words.format(kind.__name__) in said(lambda m, kind=kind: kind(m.parameters()))
        assert words.format(kind.__name__) in said(
            lambda m, kind=kind: [dense(m), kind(m.words.parameters())]
        )
    for name in ("momentum", "weight_decay"):
        assert (
            f"{name} of a ShardedEmbedding must be 0, not 0.5: give it a parameter group"
            in said(lambda m, name=name: SGD(m.parameters(), 0.1, **{name: 0.5}))
        )
    assert "maximize of a ShardedEmbedding must be 0, not True" in said(
        lambda m: [dense(m), torch.optim.Adagrad(m.words.parameters(), maximize=True)]
    )
    assert "one optimizer must have the weight of ShardedEmbedding words, not 0" in said(dense)
    assert "one optimizer must have the weight of ShardedEmbedding words, not 0" in said(
        lambda m: [dense(m)]
    )
    assert "optimizer must be a torch.optim.Optimizer, not an empty list" in said(lambda m: [])
    assert "optimizer must be a torch.optim.Optimizer, not 3" in said(lambda m: [dense(m), 3])

    def tied(embedding: Any) -> nn.Module:
        found = Linear(embedding(WORDS, WIDTH))
        found.last.weight = found.words.weight
        return found

    assert (
        "last.weight is the weight of ShardedEmbedding words, of which this rank has only some "
        "columns: a tied decoder needs nn.Embedding"
    ) in said(lambda m: SGD(m.parameters(), 0.1), tied)
    for different in (
        lambda rows, width: ShardedEmbedding(rows + rank, width),
        lambda rows, width: ShardedEmbedding(rows, width, padding_idx=rank),
        lambda rows, width: ShardedEmbedding(rows, width, dtype=[torch.float32, None][rank]),
    ):
        torch.set_default_dtype(torch.float64)
        assert "ranks 0 and 1 have different ShardedEmbeddings; this rank's: ['words " in error_of(
            lambda different=different: _attached(Linear(different(WORDS, WIDTH)))
        )
        torch.set_default_dtype(torch.float32)
    closed = built(linear, ShardedEmbedding)
    closed.words.close()
    closed.words.close()
    assert "ShardedEmbedding words is of one rank, or closed" in error_of(lambda: _attached(closed))
    assert closed.words.ops == []
    for call in (lambda: closed.words(torch.tensor([0])), closed.words.state_dict):
        assert "this ShardedEmbedding is closed: other ranks have its other col" in error_of(call)


def _attached(inner: nn.Module) -> DataParallel:
    return DataParallel(inner, SGD(inner.parameters(), 0.1))


@on_ranks(2)
def test_options_that_are_changed_later(rank: int) -> None:
    """They are looked at in each step."""
    pair = Pair("sgd")
    pair.train(0)
    pair.optimizers[1].param_groups[0]["momentum"] = 0.9
    assert "momentum of a ShardedEmbedding must be 0, not 0.9" in error_of(lambda: pair.train(1))


# ---- a rank fails --------------------------------------------------------------------------------
def until_all_know(rank: int, path: Path) -> None:
    """A failed rank lives on until the others have an error as well."""
    (path / str(rank)).touch()
    outlive(path, collectives.get_default().size)


def wrong_index(rank: int, where: str, ahead: bool, chained: bool, path: Path) -> str:
    """What this rank is told."""
    pair = Pair("adagrad", chained=chained)
    batches = [pair.share(step) for step in range(5)]
    if rank == 1:
        at = 3 if where == "next" else 0
        batches[at] = torch.tensor(WORDS).expand(2, 2), batches[at][1][:2, :2]

    def train() -> None:
        for batch in prefetch(batches) if ahead else batches:
            stepped(batch, pair.model, pair.optimizers, 2)
            pair.model.finish()  # so that the other rank does not wait for rows of this step

    said = error_of(train)
    until_all_know(rank, path)
    return said


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize(("where", "ahead"), [("first", True), ("next", True), ("next", False)])
def test_a_wrong_index_on_a_rank(where: str, ahead: bool, chained: bool, tmp_path: Path) -> None:
    args = (where, ahead, chained, tmp_path)
    said, its = collectives.spawn(wrong_index, 2, args=args, timeout=200)
    name = "ids of the next batch" if where == "next" and ahead else "ids"
    assert f"rank 1: {name} must be from 0 to {WORDS - 1}; one is {WORDS}" in its
    assert "rank 1" in said


def changed(rank: int, ahead: bool, chained: bool, path: Path) -> str:
    """A rank refuses a step of the other parameters, and lives on until the other one knows."""
    pair = Pair("sgd", chained=chained)

    def train() -> None:
        for number, (mine, _) in enumerate(pair.batches(range(5), ahead)):
            pair.clear()
            loss_of(mine, pair.model, 2).backward()
            if rank == 1 and number == 2:
                pair.model._engine._fail("of this rank")  # type: ignore[union-attr]
            for optimizer in pair.optimizers:
                optimizer.step()

    said = error_of(train)
    until_all_know(rank, path)
    return said


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_rank_refuses_a_step(ahead: bool, chained: bool, tmp_path: Path) -> None:
    said, its = collectives.spawn(changed, 2, args=(ahead, chained, tmp_path), timeout=200)
    assert its == "rank 1: of this rank"
    assert "rank 1" in said


def survive(rank: int, when: str, ahead: bool, path: Path) -> None:
    pair = Pair("sparse adam", lstm)
    pair.train(0, 1, ahead=ahead)
    if rank == 1:
        dies(pair, when)
    start = time.monotonic()
    said = error_of(lambda: pair.train(2, 3, 4, 5, ahead=ahead))
    again = error_of(lambda: pair.model(pair.share(0)[0]))
    (path / str(rank)).write_text(f"{time.monotonic() - start}\n{said}\n{again}\n{os.getpid()}")
    outlive(path, 2)  # so that this rank's end is not what another one sees


def dies(pair: Pair, when: str) -> None:
    """Let this process end in the middle of a pass, or of an exchange of the embedding."""
    if when == "forward":
        pair.inner.body.register_forward_pre_hook(lambda *_: os._exit(3))
    elif when == "backward":
        pair.inner.last.register_forward_hook(
            lambda _, __, out: out.register_hook(lambda _: os._exit(3)) and None
        )
    else:
        setattr(RowExchange, when, lambda *_: os._exit(3))


@pytest.mark.parametrize(
    ("when", "ahead"),
    [("forward", True), ("backward", False), ("tokens", False), ("fetch", True), ("add", True)],
)
def test_a_rank_dies(when: str, ahead: bool, tmp_path: Path, patient: None) -> None:
    with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) exited with status 3"):
        collectives.spawn(survive, 3, args=(when, ahead, tmp_path), timeout=200)
    for rank in (0, 2):
        seconds, *said, process = (tmp_path / str(rank)).read_text().splitlines()
        assert float(seconds) < 100
        assert len(said) == 2
        assert all("rank 1" in one for one in said), said
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


@on_ranks(3)
def test_an_exchange_raises(rank: int) -> None:
    pair = Pair("sparse adam")
    pair.train(0, 1)
    if rank == 1:
        pair.model.finish()  # what is delayed of the last step belongs to it

        def add(*_: Any) -> None:
            raise ValueError("no memory")

        RowExchange.add = add  # type: ignore[method-assign,assignment]
    found = [error_of(lambda: pair.train(2, 3, 4)), error_of(pair.model.finish)]
    error_of(pair.end)
    assert all("rank 1" in said for said in found), found


def leaves(rank: int) -> None:
    """A rank leaves its loop by an error of its own: all end."""
    pair = Pair("sgd")
    for number, (mine, _) in enumerate(pair.batches(range(9), ahead=True)):
        stepped(mine, pair.model, pair.optimizers, 2)
        if number == 2 and rank == 1:
            raise KeyError("of this rank")


def test_an_error_of_a_ranks_own() -> None:
    with pytest.raises(KeyError, match="of this rank"):
        collectives.spawn(leaves, 3, timeout=200)


# ---- process groups ------------------------------------------------------------------------------
def trained(kind: str, rank: int, size: int, group: Any) -> Any:
    inner = built(lstm, partial(ShardedEmbedding, group=group))
    optimizers = optimizers_for(inner, kind)
    model = DataParallel(inner, optimizers, schedule=schedule(lstm, "wfbp"), group=group)
    batches = [share(sentences(step), rank, size) for step in range(5)]
    for batch in prefetch(batches):
        stepped(batch, model, optimizers, size)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ops = [(op.name, op.nbytes) for op in inner.words.ops]
    model.close()
    inner.words.close()
    return state, ops


def over_gloo(rank: int) -> Any:
    size = dist.get_world_size()
    return [trained(kind, rank, size, group) for kind in SPARSE
            for group in (None, dist.group.WORLD)]  # fmt: skip


def over_communicator(rank: int, size: int) -> Any:
    return [trained(kind, rank, size, None) for kind in SPARSE for _ in range(2)]


@pytest.mark.parametrize("size", [2, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_a_process_group_trains_as_a_communicator(size: int) -> None:
    """It sends the same; rows are added in the same order, dense gradients are not."""
    found = on_group(size, over_gloo)
    want = collectives.spawn(over_communicator, size, args=(size,), timeout=60)
    for mine, its in zip(found, want, strict=True):
        assert not isinstance(mine, str), mine
        for (state, ops), (state_2, ops_2) in zip(mine, its, strict=True):
            assert ops == ops_2
            assert all(torch.allclose(state[k], state_2[k], rtol=0, atol=1e-12) for k in state)
        assert all(same(a, b) for (a, _), (b, _) in zip(mine, found[0], strict=True))


def survive_by_gloo(rank: int) -> tuple[float, str]:
    size = dist.get_world_size()
    inner = built(linear, ShardedEmbedding)
    optimizers = optimizers_for(inner, "adagrad")
    model = DataParallel(inner, optimizers, schedule=schedule(policy="wfbp"))

    def train() -> None:
        for step in range(5):
            if rank == 1 and step == 2:
                RowExchange.add = lambda *_: os._exit(3)  # type: ignore[method-assign,assignment]
            stepped(share(sentences(step), rank, size), model, optimizers, size)

    start = time.monotonic()
    said = error_of(train)
    return time.monotonic() - start, said


def test_a_rank_of_a_process_group_dies() -> None:
    found = on_group(3, survive_by_gloo, timeout=200)
    assert found[1] is None
    for rank in (0, 2):
        seconds, said = found[rank]
        assert seconds < 100
        assert f"rank {rank}, " in said


def wrong_index_by_gloo(rank: int) -> tuple[float, str]:
    embedding = ShardedEmbedding(WORDS, WIDTH)
    embedding(torch.tensor([rank]))
    start = time.monotonic()
    said = error_of(lambda: embedding(torch.tensor([WORDS * rank])))
    return time.monotonic() - start, said


def test_a_wrong_index_on_a_rank_of_a_process_group() -> None:
    """The others learn of it when that rank ends."""
    (seconds, said), (_, its) = on_group(2, wrong_index_by_gloo, timeout=200)
    assert f"rank 1: ids must be from 0 to {WORDS - 1}; one is {WORDS}" in its
    assert said.startswith("rank 0, ")
    assert seconds < 100
