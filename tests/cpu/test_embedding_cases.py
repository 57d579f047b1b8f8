"""Tables and batches of all kinds with a `ShardedEmbedding`. Each case runs on two ranks, if not
said otherwise, beside one process that trains `nn.Embedding` on the batches of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from embedding_training import (
    WIDTH,
    WORDS,
    Batch,
    Linear,
    Pair,
    imported,
    linear,
    lone,
    lstm,
    names,
    plain,
    schedule,
    sentences,
    share,
)
from torch import nn
from training_models import same

from linkweave import ShardedEmbedding, prefetch
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


# ---- tables --------------------------------------------------------------------------------------
@on_ranks(3)
def test_narrow_and_short_tables(rank: int) -> None:
    """More ranks than columns; one row."""
    for width in (1, 2):
        pair = Pair("sparse adam", partial(linear, width=width), schedule="wfbp")
        pair.train(*range(3))
        pair.close()

    def one_row(embedding: Any) -> nn.Module:
        return Linear(embedding(1, 4))

    pair = Pair("adagrad", one_row, schedule="wfbp")
    for _ in range(2):
        x, y = sentences(0)
        whole = torch.zeros_like(x), y
        for mine in prefetch([share(whole, rank, 3)] * 2):
            pair.step(mine, whole)
    pair.close()


@on_ranks(2)
def test_a_padding_row(rank: int) -> None:
    for padding in (0, 3, -WORDS + 4, -1):
        pair = Pair("adagrad", partial(linear, padding_idx=padding))
        before = pair.check()["words.weight"]
        assert not before[padding].any()
        pair.train(0, 1, 2)
        after = pair.close()["words.weight"]
        assert not after[padding].any()
        assert not torch.equal(before, after)


class Translation(nn.Module):
    """Two embeddings, and a third that two layers share: it is called twice in a forward pass."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.source, self.target = embedding(WORDS, 4), embedding(WORDS, 3)
        self.shared = embedding(WORDS, 2)
        self.encoder = nn.ModuleDict({"words": self.shared, "last": nn.Linear(6, 6)})
        self.decoder = nn.ModuleDict({"words": self.shared, "last": nn.Linear(5, WORDS)})
        self.join = nn.Linear(6, 5)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        source, target = pair
        x = torch.cat([self.source(source), self.encoder["words"](source)], -1)
        y = torch.cat([self.target(target), self.decoder["words"](target)], -1)
        return self.decoder["last"](y + self.join(self.encoder["last"](x).tanh()).tanh())


@on_ranks(2)
def test_an_encoder_and_a_decoder(rank: int) -> None:
    states = []
    for ahead in (True, False):
        pair = Pair("sparse adam", Translation, schedule="wfbp")
        assert len(pair.embeddings) == 3
        whole = [((x, x.flip(1)), y) for x, y in map(sentences, range(4))]
        mine = []
        for (source, target), y in whole:
            part, y_part = share((source, y), rank, 2)
            mine.append(((part, share((target, y), rank, 2)[0]), y_part))
        lone(pair, whole, mine, ahead)
        states.append(pair.close())
    assert same(*states)


@on_ranks(2)
def test_a_frozen_table(rank: int) -> None:
    """In an optimizer, or in none."""
    table = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(2))

    def make(embedding: Any) -> nn.Module:
        kind = ShardedEmbedding if embedding is not plain else nn.Embedding
        return Linear(kind.from_pretrained(table))

    for kind in ("one", "sgd", "none"):
        pair = Pair(kind, make)
        pair.train(0, 1, 2)
        assert {*names(pair)} == {"tokens", "lookup"}
        assert torch.equal(pair.close()["words.weight"], table.double())


@on_ranks(2)
def test_a_pretrained_table_is_trained(rank: int) -> None:
    table = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(2))

    def make(embedding: Any) -> nn.Module:
        if embedding is plain:
            return Linear(nn.Embedding.from_pretrained(table, False, 2, sparse=True))
        return Linear(ShardedEmbedding.from_pretrained(table, False, 2))

    pair = Pair("adagrad", make)
    pair.train(0, 1, 2)
    pair.close()


# ---- batches -------------------------------------------------------------------------------------
def cut(whole: Sequence[Batch], parts: Sequence[slice]) -> list[Batch]:
    return [(x[part].clone(), y[part].clone()) for (x, y), part in zip(whole, parts, strict=True)]


@on_ranks(2)
def test_ranks_without_tokens(rank: int) -> None:
    """Of one rank in some batches; of both in one, and a short last batch."""
    whole = [*map(sentences, range(4)), (sentences(4)[0][:0], sentences(4)[1][:0]), sentences(5, 1)]
    some = [slice(0), slice(2), slice(9), slice(4), slice(0), slice(rank, 1)]
    others = [slice(9), slice(2, 9), slice(0), slice(4, 9), slice(0), slice(rank, 1)]
    states = []
    for ahead in (True, False):
        for make in (linear, lstm):
            pair = Pair("sparse adam", make, schedule=schedule(make))
            lone(pair, whole, cut(whole, others if rank else some), ahead)
            states.append(pair.close())
    assert same(*states[::2])
    assert same(*states[1::2])


@on_ranks(2)
def test_indices_of_any_shape_and_dtype(rank: int) -> None:
    """As on other ranks or not."""
    pair, words = Pair("adagrad"), sentences(0)[0]
    shapes = (words[0, 0], words[0], words[:8].reshape(2, 4, 3, 2), words.T, words[:, ::2])
    for ids in (*shapes, words[:0]):
        for dtypes in ((torch.int32, torch.int64), (torch.int32, torch.int32)):
            both = [((ids + one) % WORDS).to(dtype) for one, dtype in enumerate(dtypes)]
            pair.clear()
            out = pair.model(both[rank])
            assert out.shape == (*ids.shape, WORDS)
            (out.square().sum() / 100).backward()
            sum(pair.alone(one).square().sum() / 200 for one in both).backward()
            pair.update()
    pair.close()


@on_ranks(2)
def test_the_loader_ends_earlier_on_a_rank(rank: int) -> None:
    """That rank begins its loader again, the other goes on."""
    lengths = (2, 4) if rank else (4, 2)
    pair = Pair("sparse adam")
    step = 0
    for length in lengths:
        for mine in prefetch([pair.share(step + i) for i in range(length)]):
            pair.step(mine, sentences(step))
            step += 1
    ops = names(pair)
    assert ops.count("no tokens") == 2
    assert ops.count("prior") == 6
    pair.close()


@on_ranks(2)
def test_a_loop_that_is_left(rank: int) -> None:
    """What was announced is forgotten, and another loop begins."""
    pair = Pair("sgd")
    for _ in range(3):
        batches = zip(prefetch([pair.share(step) for step in range(9)]), range(2), strict=False)
        for mine, step in batches:
            pair.step(mine, sentences(step))
    schedule = pair.embeddings[0].schedule
    assert schedule is not None
    assert len(schedule._announced) <= 2
    pair.close()
