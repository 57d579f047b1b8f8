"""What the tests of `ShardedEmbedding` share: a text, language models, and their training beside
that of one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import apart, copied, on_all, schedule_for

from linkweave import collectives
from linkweave.collectives import DataParallel, ShardedEmbedding, prefetch
from linkweave.kernels.embedding import adagrad_rows, adam_rows, sgd_rows

TEXT = Path(__file__).parents[1] / "data" / "genesis.txt"
"""Genesis 1, 1-23, in the King James Version."""
COUNT, LENGTH, WIDTH = 9, 6, 5
"""Sentences of a batch for all ranks together, words of a sentence, columns."""
Batch = tuple[torch.Tensor, torch.Tensor]
State = dict[str, torch.Tensor]


@cache
def text() -> torch.Tensor:
    """The words of the text, numbered in the order in which they first occur."""
    words = re.findall(r"[a-z]+", TEXT.read_text().lower())
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] for word in words])


WORDS = int(text().max()) + 1


def sentences(step: int, count: int = COUNT) -> Batch:
    """The batch of a step, for all ranks together: words, and those that follow each."""
    first = (step * count + torch.arange(count)) * LENGTH % (len(text()) - LENGTH - 1)
    found = text()[first[:, None] + torch.arange(LENGTH + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def share(batch: Batch, rank: int, size: int) -> Batch:
    """A rank's part of a batch, whose sentences ranks divide as evenly as can be."""
    x, y = batch
    mine = slice(len(x) * rank // size, len(x) * (rank + 1) // size)
    return x[mine].clone(), y[mine].clone()


# ---- models --------------------------------------------------------------------------------------
class Lstm(nn.Module):
    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        self.body = nn.LSTM(WIDTH, 7, batch_first=True)
        self.last = nn.Linear(7, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        return self.last(self.body(x)[0] if len(x) else x.new_zeros(*x.shape[:2], 7) + x.sum())


class Transformer(nn.Module):
    """One block, in which a word sees those before it."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WORDS)
        later = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        seen = self.attention(x, x, x, attn_mask=self.later, need_weights=False)[0]
        return self.last(self.norm(x + seen))


class Linear(nn.Module):
    """The smallest one."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        self.last = nn.Linear(words.embedding_dim, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x).tanh())


Make = Callable[[Any], nn.Module]
"""A model whose embedding, or embeddings, the argument constructs: `nn.Embedding(sparse=True)` or
`ShardedEmbedding`."""


def lstm(embedding: Any) -> nn.Module:
    return Lstm(embedding(WORDS, WIDTH))


def transformer(embedding: Any) -> nn.Module:
    return Transformer(embedding(WORDS, WIDTH))


def linear(embedding: Any, width: int = WIDTH, **options: Any) -> nn.Module:
    return Linear(embedding(WORDS, width, **options))


plain = partial(nn.Embedding, sparse=True)


def built(make: Make, embedding: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with the parameters that all tests begin with."""
    torch.manual_seed(3)
    return make(embedding).to(dtype)


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, 0.02),
}


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """Of the embeddings."""
    kinds = (nn.Embedding, ShardedEmbedding)
    return [part.weight for part in model.modules() if isinstance(part, kinds)]


def optimizers_for(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """One of all other parameters and one of the embeddings, unless `kind` is "none"; for "one",
    one of all."""
    if kind == "one":
        return [torch.optim.SGD(model.parameters(), 0.5)]
    rows = weights_of(model)
    others = [p for p in model.parameters() if not any(p is row for row in rows)]
    first = torch.optim.SGD(others, 0.1, momentum=0.9)
    return [first] if kind == "none" else [first, SPARSE[kind](rows)]


@cache
def schedule(
    make: Make = linear, policy: str = "bytescheduler", chained: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Any:  # fmt: skip
    """A policy's schedule for all parameters but those of embeddings."""
    model = built(make, plain, dtype)
    for weight in weights_of(model):
        weight.requires_grad_(False)
    return schedule_for(model, sentences(0)[0], policy=policy, chained=chained)


# ---- training ------------------------------------------------------------------------------------
def stepped(batch: Batch, model: Any, optimizers: Sequence[Any], size: int = 1) -> None:
    """A step on the part of a batch that one of `size` ranks has."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(batch, model, size).backward()
    for optimizer in optimizers:
        optimizer.step()


def loss_of(batch: Batch, model: Any, size: int = 1) -> torch.Tensor:
    """Whose average over `size` ranks is the mean over all words of a batch."""
    x, y = batch
    out = model(x).flatten(0, -2)
    return cross_entropy(out, y.flatten(), reduction="sum") * size / (COUNT * LENGTH)


class Pair:
    """A DataParallel with a sharded embedding, and a model of one process with `nn.Embedding` that
    trains on the batches of all ranks."""

    def __init__(
        self, kind: str = "sgd", make: Make = linear, chained: bool = True,
        policy: str = "bytescheduler", dtype: torch.dtype = torch.float64, group: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.inner = built(make, partial(ShardedEmbedding, group=group), dtype)
        self.alone = built(make, plain, dtype)
        self.optimizers = optimizers_for(self.inner, kind)
        self.alone_optimizers = optimizers_for(self.alone, kind)
        if "schedule" not in options:
            options["schedule"] = schedule(make, policy, chained, dtype)
        self.model = DataParallel(self.inner, self.optimizers, group=group, **options)
        self.group = group or collectives.get_default()
        self.rank: int = self.group.rank
        self.size: int = self.group.size

    @property
    def embeddings(self) -> list[ShardedEmbedding]:
        return [part for part in self.inner.modules() if isinstance(part, ShardedEmbedding)]

    @property
    def sides(self) -> list[tuple[Any, list[Any], bool]]:
        """(model, optimizers, whether of one process)."""
        return [(self.model, self.optimizers, False), (self.alone, self.alone_optimizers, True)]

    def share(self, step: int) -> Batch:
        return share(sentences(step), self.rank, self.size)

    def batches(self, steps: Sequence[int], ahead: bool) -> Iterator[tuple[Batch, Batch]]:
        """This rank's batch, and that of one process."""
        mine = [self.share(step) for step in steps]
        whole = [sentences(step) for step in steps]
        return zip(prefetch(mine) if ahead else mine, whole, strict=True)

    def backward(self, mine: Batch, whole: Batch) -> None:
        loss_of(mine, self.model, self.size).backward()
        loss_of(whole, self.alone).backward()

    def update(self) -> None:
        for optimizer in (*self.optimizers, *self.alone_optimizers):
            optimizer.step()

    def clear(self) -> None:
        for optimizer in (*self.optimizers, *self.alone_optimizers):
            optimizer.zero_grad()

    def step(self, mine: Batch, whole: Batch) -> None:
        self.clear()
        self.backward(mine, whole)
        self.update()

    def train(self, *steps: int, ahead: bool = True) -> None:
        for mine, whole in self.batches(steps, ahead):
            self.step(mine, whole)

    def check(self, within: float = 1e-12) -> State:
        """Raise unless parameters are those of one process, and the same bits on all ranks."""
        state = copied(self.model.state_dict())
        assert on_all(self.group, state)
        assert apart(state, self.alone.state_dict()) < within
        return state

    def close(self) -> State:
        state = self.check()
        self.end()
        return state

    def end(self) -> None:
        self.model.close()
        for embedding in self.embeddings:
            embedding.close()


def names(pair: Pair) -> list[str]:
    """Of the ops since the last call."""
    (embedding,) = pair.embeddings
    pair.model.finish()
    found = [op.name for op in embedding.ops]
    assert embedding.schedule is not None
    embedding.schedule.lane.ops.clear()
    return found


def lone(pair: Pair, whole: Sequence[Batch], mine: Sequence[Batch], ahead: bool = True) -> None:
    """Steps on batches that are divided as said."""
    for one, every in zip(prefetch(mine) if ahead else mine, whole, strict=True):
        pair.step(one, every)


@pytest.fixture(scope="session")
def imported() -> None:
    """Ranks are forked with what a first step imports and compiles, which takes seconds."""
    for kind in SPARSE:
        model = built(lstm, plain)
        stepped(sentences(0), model, optimizers_for(model, kind))
    for make in (linear, lstm):
        schedule(make)
    for update, tables in ((sgd_rows, 1), (adagrad_rows, 2), (adam_rows, 3)):
        rows, *more = torch.ones(1 + tables, 1, 1, dtype=torch.float64)
        options = {"step": 1} if update is adam_rows else {}
        update(*more, torch.tensor([0]), rows, lr=0.1, **options)
