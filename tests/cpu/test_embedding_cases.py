"""Loops, batches and models of all kinds with a `ShardedEmbedding`. Each case runs on two ranks, if
not said otherwise, beside one process that trains `nn.Embedding` on the batches of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from embedding_training import (
    SPARSE,
    WIDTH,
    WORDS,
    Batch,
    Linear,
    Pair,
    imported,  # noqa: F401
    linear,
    loss_of,
    lstm,
    plain,
    schedule,
    sentences,
    share,
    stepped,
)
from torch import nn
from training_models import apart, copied, same
from training_pair import Cases

from linkweave import GTopK, ShardedEmbedding, collectives, prefetch
from linkweave.collectives import CollectiveError

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


def names(pair: Pair) -> list[str]:
    """Of the ops since the last call."""
    (embedding,) = pair.embeddings
    pair.model.finish()
    found = [op.name for op in embedding.ops]
    assert embedding.schedule is not None
    embedding.schedule.lane.ops.clear()
    return found


# ---- tables --------------------------------------------------------------------------------------
def shapes(rank: int) -> None:
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
            pair.clear()
            pair.backward(mine, whole)
            pair.update()
    pair.close()


def test_narrow_and_short_tables() -> None:
    collectives.spawn(shapes, 3, timeout=20)


@case
def a_padding_row(rank: int) -> None:
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


@case
def an_encoder_and_a_decoder(rank: int) -> None:
    states = []
    for ahead in (True, False):
        pair = Pair("sparse adam", Translation, schedule="wfbp")
        assert len(pair.embeddings) == 3
        whole = [((x, x.flip(1)), y) for x, y in map(sentences, range(4))]
        mine = []
        for (source, target), y in whole:
            part, y_part = share((source, y), rank, 2)
            mine.append(((part, share((target, y), rank, 2)[0]), y_part))
        for one, every in zip(prefetch(mine) if ahead else mine, whole, strict=True):
            pair.clear()
            pair.backward(one, every)
            pair.update()
        states.append(pair.close())
    assert same(*states)


@case
def a_frozen_table(rank: int) -> None:
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


@case
def a_pretrained_table_is_trained(rank: int) -> None:
    table = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(2))

    def make(embedding: Any) -> nn.Module:
        if embedding is plain:
            return Linear(nn.Embedding.from_pretrained(table, False, 2, sparse=True))
        return Linear(ShardedEmbedding.from_pretrained(table, False, 2))

    pair = Pair("adagrad", make)
    pair.train(0, 1, 2)
    pair.close()


# ---- batches -------------------------------------------------------------------------------------
def lone(pair: Pair, whole: Sequence[Batch], mine: Sequence[Batch], ahead: bool = True) -> None:
    """Steps on batches that are divided as said."""
    for one, every in zip(prefetch(mine) if ahead else mine, whole, strict=True):
        pair.clear()
        pair.backward(one, every)
        pair.update()


def cut(whole: Sequence[Batch], parts: Sequence[slice]) -> list[Batch]:
    return [(x[part].clone(), y[part].clone()) for (x, y), part in zip(whole, parts, strict=True)]


@case
def ranks_without_tokens(rank: int) -> None:
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


@case
def indices_of_any_shape_and_dtype(rank: int) -> None:
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


@case
def the_loader_ends_earlier_on_a_rank(rank: int) -> None:
    """That rank begins its loader again, the other goes on."""
    lengths = (2, 4) if rank else (4, 2)
    pair = Pair("sparse adam")
    step = 0
    for length in lengths:
        for mine in prefetch([pair.share(step + i) for i in range(length)]):
            pair.clear()
            pair.backward(mine, sentences(step))
            pair.update()
            step += 1
    ops = names(pair)
    assert ops.count("no tokens") == 2
    assert ops.count("prior") == 6
    pair.close()


@case
def a_loop_that_is_left(rank: int) -> None:
    """What was announced is forgotten, and another loop begins."""
    pair = Pair("sgd")
    for _ in range(3):
        batches = zip(prefetch([pair.share(step) for step in range(9)]), range(2), strict=False)
        for mine, step in batches:
            pair.clear()
            pair.backward(mine, sentences(step))
            pair.update()
    schedule = pair.embeddings[0].schedule
    assert schedule is not None
    assert len(schedule._announced) <= 2
    pair.close()


# ---- loops ---------------------------------------------------------------------------------------
@case
def gradients_are_accumulated(rank: int) -> None:
    for ahead in (True, False):
        pair = Pair("adagrad")
        for number, (mine, whole) in enumerate(pair.batches(range(7), ahead)):
            if number % 3 == 2:
                pair.backward(mine, whole)
                pair.update()
                pair.clear()
            else:
                with pair.model.no_sync():
                    pair.backward(mine, whole)
        pair.close()


@case
def steps_are_left_out(rank: int) -> None:
    """By `zero_grad` without `step`: of the optimizers, and of the model."""
    for ahead in (True, False):
        for clear in (Pair.clear, lambda pair: (pair.model.zero_grad(), pair.alone.zero_grad())):
            pair = Pair("sparse adam")
            for number, (mine, whole) in enumerate(pair.batches(range(6), ahead)):
                pair.backward(mine, whole)
                if number not in (1, 2, 4):
                    pair.update()
                clear(pair)
            pair.close()


@case
def gradients_that_are_set_to_zeros(rank: int) -> None:
    pair = Pair("adagrad")
    for mine, whole in pair.batches(range(4), ahead=True):
        for optimizer in (*pair.optimizers, *pair.alone_optimizers):
            optimizer.zero_grad(set_to_none=False)
        pair.backward(mine, whole)
        pair.update()
    pair.close()


@case
def hooks_of_optimizers(rank: int) -> None:
    """A step with hooks is one of all parameters."""
    for kind in ("one", "sgd"):
        pair, called = Pair(kind), []
        for optimizer in pair.optimizers:
            optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        pair.train(*range(3))
        assert len(called) >= 3
        pair.close()


@case
def a_pass_between_backward_and_step(rank: int) -> None:
    """It announces the next batch once more, whose rows the step may not fetch yet."""
    for ahead in (True, False):
        pair = Pair("sgd")
        for mine, whole in pair.batches(range(5), ahead):
            pair.clear()
            pair.backward(mine, whole)
            pair.model(mine[0])
            pair.update()
        pair.close()


@case
def a_loss_of_rows_alone(rank: int) -> None:
    for ahead in (True, False):
        pair = Pair("adagrad")
        for number, (mine, whole) in enumerate(pair.batches(range(5), ahead)):
            pair.clear()
            if number in (1, 3):
                (pair.inner.words(mine[0]).square().sum() * pair.size / 200).backward()
                (pair.alone.words(whole[0]).square().sum() / 200).backward()
            else:
                pair.backward(mine, whole)
            pair.update()
        pair.close()


def too_late(rank: int, stepped: bool) -> None:
    """Of calls from before `zero_grad`, and from before a step."""
    pair = Pair()
    first, second = (loss_of(pair.share(step), pair.model, pair.size) for step in (0, 1))
    first.backward(retain_graph=True)
    pair.update() if stepped else pair.clear()
    with pytest.raises(CollectiveError, match="before the last step or zero_grad, which"):
        (first if stepped else second).backward()


@pytest.mark.parametrize("stepped", [False, True])
def test_gradients_that_come_too_late(stepped: bool) -> None:
    collectives.spawn(too_late, 2, args=(stepped,), timeout=8)


@case
def zero_grad_between_the_passes(rank: int) -> None:
    for ahead in (True, False):
        pair = Pair("adagrad")
        for mine, whole in pair.batches(range(4), ahead):
            losses = loss_of(mine, pair.model, pair.size), loss_of(whole, pair.alone)
            pair.clear()
            for loss in losses:
                loss.backward()
            pair.update()
        pair.close()


@case
def several_passes_before_a_step(rank: int) -> None:
    """Two backward passes after two forward passes; without `no_sync`."""
    pair = Pair("sgd")
    for step in (0, 2, 4):
        pair.clear()
        numbers = step, step + 1
        losses = [loss_of(pair.share(number), pair.model, 2) for number in numbers]
        losses += [loss_of(sentences(number), pair.alone) for number in numbers]
        for loss in losses:
            loss.backward()
        pair.update()
    pair.close()


@case
def evaluation_between_steps(rank: int) -> None:
    """Also while batches are announced, and of those very batches."""
    pair = Pair("adagrad", lstm)
    held = sentences(7)[0]
    mine_all = [pair.share(step) for step in range(5)]
    for number, mine in enumerate(prefetch(mine_all)):
        pair.clear()
        pair.backward(mine, sentences(number))
        pair.update()
        for model in (pair.model, pair.alone):
            model.eval()
        with torch.no_grad():
            assert torch.allclose(pair.model(held), pair.alone(held), rtol=0, atol=1e-12)
            following = mine_all[min(number + 1, 4)][0]
            found = pair.model(following)
            assert torch.allclose(found, pair.alone(following), rtol=0, atol=1e-12)
        with torch.inference_mode():
            assert torch.equal(pair.model(following), found)
            assert torch.equal(pair.model(following.clone()), found)
        for model in (pair.model, pair.alone):
            model.train()
    pair.close()


@case
def a_rank_whose_loss_does_not_reach_the_embedding(rank: int) -> None:
    """Its gradients count as zeros, also in steps that are left out."""

    class Sometimes(Linear):
        reaches = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.words(x)
            return self.last((rows if self.reaches else rows.detach()).tanh())

    def make(embedding: Any) -> nn.Module:
        return Sometimes(embedding(WORDS, WIDTH))

    pair = Pair("sgd", make)
    parts = [(model, parts) for model, parts in ((pair.inner, [rank]), (pair.alone, [0, 1]))]
    for step in range(6):
        pair.clear()
        for inner, ranks in parts:
            for one in ranks:
                inner.reaches = one == step % 2 or step == 4
                model, factor = (pair.model, 2) if inner is pair.inner else (inner, 1)
                loss_of(share(sentences(step), one, 2), model, factor).backward()
        if step not in (1, 2):
            pair.update()
    pair.close()


@case
def clipping(rank: int) -> None:
    for norm_type, chained, ahead in ((2.0, True, True), (torch.inf, False, True),
                                      (torch.inf, True, False), (1.0, False, False)):  # fmt: skip
        pair = Pair("sgd", chained=chained)
        dense = nn.Embedding.from_pretrained(pair.alone.words.weight.detach(), False)
        pair.alone.words = dense  # torch does not clip sparse gradients
        pair.alone_optimizers[1] = SPARSE["sgd"](dense.parameters())
        for mine, whole in pair.batches(range(4), ahead):
            pair.clear()
            pair.backward(mine, whole)
            found = pair.model.clip_grad_norm_(0.05, norm_type)
            want = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.05, norm_type)
            assert float(want) > 0.05
            assert float(found) == pytest.approx(float(want), rel=1e-13, abs=0)
            pair.update()
        pair.close()


@case
def clipping_of_narrow_tables(rank: int) -> None:
    """A rank has no columns; gradients that are clipped once are not sent again."""
    pair = Pair("sgd", partial(linear, width=1), schedule="wfbp")
    for norm_type in (2.0, torch.inf):
        pair.backward(pair.share(0), sentences(0))
        names(pair)
        first = float(pair.model.clip_grad_norm_(1e-3, norm_type))
        again = float(pair.model.clip_grad_norm_(1e-3, norm_type))
        assert first > 1e-3 >= again
        for optimizer in pair.optimizers:
            optimizer.step()
        assert names(pair).count("lookup") == 0
        pair.clear()
    pair.end()


@case
def learning_rate_schedulers(rank: int) -> None:
    """Rows that are updated later take the rate of their step."""
    for kind in SPARSE:
        pair = Pair(kind)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
            for optimizer in (*pair.optimizers, *pair.alone_optimizers)
        ]
        for mine, whole in pair.batches(range(6), ahead=True):
            pair.clear()
            pair.backward(mine, whole)
            pair.update()
            for scheduler in schedulers:
                scheduler.step()
        assert pair.optimizers[1].param_groups[0]["lr"] < 0.1 * SPARSE[kind](
            [torch.zeros(1, requires_grad=True)]
        ).param_groups[0]["lr"]  # fmt: skip
        pair.close()


@case
def groups_of_parameters(rank: int) -> None:
    """One SGD with momentum for all but the embedding."""
    pair = Pair("one")
    for inner, optimizers in ((pair.inner, pair.optimizers), (pair.alone, pair.alone_optimizers)):
        assert len(optimizers) == 1
        (group,) = optimizers[0].__dict__["param_groups"]
        words = inner.words.weight
        group["params"] = [p for p in group["params"] if p is not words]
        group.update(momentum=0.9)
        optimizers[0].add_param_group({"params": [words], "lr": 0.2, "momentum": 0.0})
    pair.train(*range(4))
    pair.close()


@case
def closures(rank: int) -> None:
    """`step` of each optimizer returns its closure's loss."""
    pair = Pair("sgd")
    pair.backward(pair.share(0), sentences(0))
    assert pair.optimizers[1].step(lambda: 3.0) == 3.0
    assert pair.alone_optimizers[1].step(lambda: 3.0) == 3.0
    for optimizers in (pair.optimizers, pair.alone_optimizers):
        optimizers[0].step()
    pair.close()


@case
def the_weight_is_changed(rank: int) -> None:
    """Rows that were fetched before are fetched again."""
    pair = Pair("sgd")
    for number, (mine, whole) in enumerate(pair.batches(range(4), ahead=True)):
        pair.clear()
        pair.backward(mine, whole)
        pair.update()
        if number == 1:
            names(pair)
            with torch.no_grad():
                for model in (pair.model, pair.alone):
                    next(p for n, p in model.named_parameters() if n == "words.weight").mul_(0.5)
    assert names(pair).count("lookup") == 1 + 2
    pair.close()


# ---- GTopK ---------------------------------------------------------------------------------------
@case
def sparse_exchanges(rank: int) -> None:
    """`GTopK` sends the other parameters; rows are those of a dense exchange."""
    states = []
    for exchange in ("dense", GTopK(1.0, warmup=())):
        pair = Pair("adagrad", chained=False, policy="wfbp", exchange=exchange, dtype=torch.float32)
        for mine, _ in pair.batches(range(5), ahead=True):
            stepped(mine, pair.model, pair.optimizers, 2)
        states.append(copied(pair.model.state_dict()))
        pair.end()
    assert apart(*states) < 1e-5


@case
def a_step_that_a_sparse_exchange_skips(rank: int) -> None:
    """For a gradient that is not finite, in whichever order the optimizers step."""
    for order in (1, -1):
        pair = Pair(
            "sparse adam", chained=False, policy="wfbp", exchange=GTopK(0.3, warmup=()),
            dtype=torch.float32,
        )  # fmt: skip
        added = torch.zeros(1)
        pair.inner.last.bias.register_hook(lambda gradient, added=added: gradient + added)
        for number, (mine, _) in enumerate(pair.batches(range(4), ahead=True)):
            before = copied(pair.model.state_dict())
            added.fill_(torch.inf if number == 2 and rank == 1 else 0)
            stepped(mine, pair.model, pair.optimizers[::order], 2)
            assert same(pair.model.state_dict(), before) == (number == 2)
        assert pair.optimizers[1].state_dict()["state"][0]["step"] == 3
        pair.end()


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
