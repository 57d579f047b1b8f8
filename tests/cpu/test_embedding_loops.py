"""Loops of training of all kinds with a `ShardedEmbedding`: what comes between passes and steps.
Each case runs on two ranks, beside one process that trains `nn.Embedding` on the batches of
both."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from embedding_training import (
    SPARSE,
    WIDTH,
    WORDS,
    Linear,
    Pair,
    imported,
    linear,
    loss_of,
    lstm,
    names,
    sentences,
    share,
    stepped,
)
from torch import nn
from training_models import apart, copied, same

from linkweave import GTopK, prefetch
from linkweave.collectives import CollectiveError
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


@on_ranks(2)
def test_gradients_are_accumulated(rank: int) -> None:
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


@on_ranks(2)
def test_steps_are_left_out(rank: int) -> None:
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


@on_ranks(2)
def test_gradients_that_are_set_to_zeros(rank: int) -> None:
    pair = Pair("adagrad")
    for mine, whole in pair.batches(range(4), ahead=True):
        for optimizer in (*pair.optimizers, *pair.alone_optimizers):
            optimizer.zero_grad(set_to_none=False)
        pair.backward(mine, whole)
        pair.update()
    pair.close()


@on_ranks(2)
def test_hooks_of_optimizers(rank: int) -> None:
    """A step with hooks is one of all parameters."""
    for kind in ("one", "sgd"):
        pair, called = Pair(kind, chained=False), []
        for optimizer in pair.optimizers:
            optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        pair.train(*range(3))
        assert len(called) >= 3
        pair.close()


@on_ranks(2)
def test_a_pass_between_backward_and_step(rank: int) -> None:
    """It announces the next batch once more, whose rows the step may not fetch yet."""
    for ahead in (True, False):
        pair = Pair("sgd")
        for mine, whole in pair.batches(range(5), ahead):
            pair.clear()
            pair.backward(mine, whole)
            pair.model(mine[0])
            pair.update()
        pair.close()


@on_ranks(2)
def test_a_loss_of_rows_alone(rank: int) -> None:
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


@pytest.mark.parametrize("stepped", [False, True])
@on_ranks(2)
def test_gradients_that_come_too_late(rank: int, stepped: bool) -> None:
    """Of calls from before `zero_grad`, and from before a step."""
    pair = Pair()
    first, second = (loss_of(pair.share(step), pair.model, pair.size) for step in (0, 1))
    if stepped:  # of rows alone, as torch itself refuses layers that the step has changed
        first = pair.inner.words(pair.share(0)[0]).square().sum()
    first.backward(retain_graph=True)
    if stepped:
        pair.update()
    else:
        pair.clear()
        pair.model.state_dict()  # waits for all ranks, as one that fails ends what others exchange
    with pytest.raises(CollectiveError, match="before the last step or zero_grad, which"):
        (first if stepped else second).backward()


@on_ranks(2)
def test_zero_grad_between_the_passes(rank: int) -> None:
    for ahead in (True, False):
        pair = Pair("adagrad")
        for mine, whole in pair.batches(range(4), ahead):
            losses = loss_of(mine, pair.model, pair.size), loss_of(whole, pair.alone)
            pair.clear()
            for loss in losses:
                loss.backward()
            pair.update()
        pair.close()


@on_ranks(2)
def test_several_passes_before_a_step(rank: int) -> None:
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


@on_ranks(2)
def test_evaluation_between_steps(rank: int) -> None:
    """Also while batches are announced, and of those very batches."""
    pair = Pair("adagrad", lstm)
    held = sentences(7)[0]
    mine_all = [pair.share(step) for step in range(5)]
    for number, mine in enumerate(prefetch(mine_all)):
        pair.step(mine, sentences(number))
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


@on_ranks(2)
def test_a_rank_whose_loss_does_not_reach_the_embedding(rank: int) -> None:
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


@on_ranks(2)
def test_clipping(rank: int) -> None:
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


@on_ranks(2)
def test_clipping_of_narrow_tables(rank: int) -> None:
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


@on_ranks(2)
def test_learning_rate_schedulers(rank: int) -> None:
    """Rows that are updated later take the rate of their step."""
    for kind in SPARSE:
        pair = Pair(kind)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
            for optimizer in (*pair.optimizers, *pair.alone_optimizers)
        ]
        for mine, whole in pair.batches(range(6), ahead=True):
            pair.step(mine, whole)
            for scheduler in schedulers:
                scheduler.step()
        assert pair.optimizers[1].param_groups[0]["lr"] < 0.1 * SPARSE[kind](
            [torch.zeros(1, requires_grad=True)]
        ).param_groups[0]["lr"]  # fmt: skip
        pair.close()


@on_ranks(2)
def test_groups_of_parameters(rank: int) -> None:
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


@on_ranks(2)
def test_closures(rank: int) -> None:
    """`step` of each optimizer returns its closure's loss."""
    pair = Pair("sgd")
    pair.backward(pair.share(0), sentences(0))
    assert pair.optimizers[1].step(lambda: 3.0) == 3.0
    assert pair.alone_optimizers[1].step(lambda: 3.0) == 3.0
    for optimizers in (pair.optimizers, pair.alone_optimizers):
        optimizers[0].step()
    pair.close()


@on_ranks(2)
def test_the_weight_is_changed(rank: int) -> None:
    """Rows that were fetched before are fetched again."""
    pair = Pair("sgd")
    for number, (mine, whole) in enumerate(pair.batches(range(4), ahead=True)):
        pair.step(mine, whole)
        if number == 1:
            names(pair)
            with torch.no_grad():
                for model in (pair.model, pair.alone):
                    next(p for n, p in model.named_parameters() if n == "words.weight").mul_(0.5)
    assert names(pair).count("lookup") == 1 + 2
    pair.close()


# ---- GTopK ---------------------------------------------------------------------------------------
@on_ranks(2)
def test_sparse_exchanges(rank: int) -> None:
    """`GTopK` sends the other parameters; rows are those of a dense exchange."""
    states = []
    for exchange in ("dense", GTopK(1.0)):
        pair = Pair("adagrad", chained=False, policy="wfbp", exchange=exchange, dtype=torch.float32)
        for mine, _ in pair.batches(range(5), ahead=True):
            stepped(mine, pair.model, pair.optimizers, 2)
        states.append(copied(pair.model.state_dict()))
        pair.end()
    assert apart(*states) < 1e-5


@on_ranks(2)
def test_a_step_that_a_sparse_exchange_skips(rank: int) -> None:
    """For a gradient that is not finite, in whichever order the optimizers step."""
    for order in (1, -1):
        pair = Pair(
            "sparse adam", chained=False, policy="wfbp", exchange=GTopK(0.3), dtype=torch.float32
        )
        added = torch.zeros(1)
        pair.inner.last.bias.register_hook(lambda gradient, added=added: gradient + added)
        for number, (mine, _) in enumerate(pair.batches(range(4), ahead=True)):
            before = copied(pair.model.state_dict())
            added.fill_(torch.inf if number == 2 and rank == 1 else 0)
            stepped(mine, pair.model, pair.optimizers[::order], 2)
            assert same(pair.model.state_dict(), before) == (number == 2)
        assert pair.optimizers[1].state_dict()["state"][0]["step"] == 3
        pair.end()
