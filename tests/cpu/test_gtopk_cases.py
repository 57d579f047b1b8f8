"""Models, loops and gradients of all kinds under `GTopK`. Each case runs on two ranks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import pytest
import torch
from gtopk_reference import batch
from gtopk_training import ALL, SGD, Training, small
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import (
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,
    made,
    on_all,
    same,
    schedule_for,
    sentences,
    share,
)

from linkweave import GTopK, collectives
from linkweave.collectives import DataParallel
from linkweave.collectives.training.gtopk.options import kept_in
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
FEW = GTopK(0.05)
WAYS = [GTopK(0.05, mode=mode, per=per)
        for mode, per in product(("gtopk", "topk"), ("bucket", "unit"))]  # fmt: skip


class Branches(nn.Module):
    """With a layer that some ranks visit."""

    def __init__(self, visits: bool = True) -> None:
        super().__init__()
        self.body, self.extra = small(), nn.Linear(10, 10)
        self.visits = visits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.extra(x) if self.visits else x


# ---- parameters ----------------------------------------------------------------------------------
@on_ranks(2)
def test_a_layer_that_one_rank_visits(rank: int) -> None:
    """What all send is averaged with zeros of the ranks that have no gradient; all decay."""
    for spec in (ALL, GTopK(1.0, mode="gtopk")):
        found = []
        for exchange in ("dense", spec):
            mine = Training(exchange, make=Branches, lr=0.1, momentum=0.9, weight_decay=0.3)
            for step in range(4):
                mine.inner.visits = step == 0 or rank == step % 2
                mine.steps(step)
            found.append(mine.close())
        assert apart(*found) < 1e-6


@on_ranks(2)
def test_a_layer_that_no_rank_visits(rank: int) -> None:
    """None has a gradient, as without an exchange."""
    for optimizer in (lambda p: SGD(p, 0.1, momentum=0.9), adamw):
        spec = FEW if optimizer is not adamw else GTopK(0.05)
        mine = Training(spec, optimizer, make=partial(Branches, False))
        before = copied(mine.inner.state_dict())
        mine.steps(0, 1, 2)
        mine.model.finish()
        assert mine.inner.extra.weight.grad is None
        unused = {k: v for k, v in mine.close().items() if "extra" in k}
        assert same(unused, {k: before[k] for k in unused})


@on_ranks(2)
def test_frozen_and_thawed_parameters(rank: int) -> None:
    mine = Training(FEW, policy="auto", measured=True, lr=0.1, momentum=0.9).steps(0, 1)
    before, state = copied(mine.inner.state_dict()), mine.sparse.state_dict()
    assert state["steps"] == 2
    mine.inner[3].requires_grad_(False)
    mine.optimizer.zero_grad()
    mine.model(batch(2, rank, 2)[0])  # ends the units
    now = kept_in(mine.optimizer.state_dict())
    assert now["steps"] == 2
    assert same(now["residual"], state["residual"])
    assert all(x.any() for name, x in now["residual"].items() if "weight" in name)
    mine.steps(2, 3)
    assert mine.sparse.state_dict()["residual"].keys() == {
        "1.weight",
        "1.bias",
        "5.weight",
        "5.bias",
    }
    after = mine.model.state_dict()
    assert torch.equal(after["3.weight"], before["3.weight"])
    assert not torch.equal(after["1.weight"], before["1.weight"])
    mine.inner[3].requires_grad_(True)
    mine.steps(4, 5)
    assert mine.sparse.state_dict()["steps"] == 6
    assert mine.sparse.state_dict()["residual"].keys() == state["residual"].keys()
    mine.close()


@on_ranks(2)
def test_tied_weights(rank: int) -> None:
    states = []
    for exchange in (FEW, ALL, "dense"):
        inner = made("transformer", torch.float32)
        optimizer = SGD(inner.parameters(), 0.1, momentum=0.9)
        plan = schedule_for(inner, sentences(0, 2)[0], policy="wfbp")
        model = DataParallel(inner, optimizer, schedule=plan, exchange=exchange)
        for step in range(4):
            optimizer.zero_grad()
            x, y = share(sentences(step, 4), rank, 2)
            cross_entropy(model(x), y).backward()
            optimizer.step()
        assert inner.decoder.weight is inner.embedding.weight
        states.append(copied(model.state_dict()))
        assert on_all(collectives.get_default(), states[-1])
        model.close()
    assert apart(states[1], states[2]) < 1e-6
    assert not same(states[0], states[2])


@on_ranks(2)
def test_channels_last(rank: int) -> None:
    def cnn() -> nn.Module:
        return made("cnn", torch.float32).to(memory_format=torch.channels_last)

    for every, momentum in ((ALL, 0.9), (GTopK(1.0, mode="gtopk"), 0.0)):
        both = (Training(exchange, make=cnn, lr=0.1, momentum=momentum)
                for exchange in ("dense", every))  # fmt: skip
        assert apart(*(one.steps(0, 1, 2).close() for one in both)) < 1e-6


@on_ranks(2)
def test_dtypes(rank: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(64, 12, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(12)
            self.last = nn.Linear(12, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x.flatten(1).bfloat16()).float()).tanh())

    for spec in (FEW, ALL, GTopK(0.05, per="unit", mode="topk")):
        mine = Training(spec, make=Mixed, lr=0.1, momentum=0.5).steps(0, 1, 2, 3)
        assert {x.dtype for x in mine.sparse._residuals} == {torch.float32}
        assert {op.buffer for op in mine.model.program.ops} == {0, 1}
        mine.close()
    want = Training("dense", make=Mixed, lr=0.1).steps(0).close()
    assert apart(Training(ALL, make=Mixed, lr=0.1).steps(0).close(), want) < 1e-6
    inner = small().double()
    double = DataParallel(inner, SGD(inner.parameters(), 0.1), exchange=FEW)
    words = "GTopK takes float32, float16 and bfloat16 parameters on CPUs and GPUs; those of 1 are"
    assert words in error_of(double(images(0, 2)[0]).sum().backward)


# ---- loops ---------------------------------------------------------------------------------------
@on_ranks(2)
def test_gradients_are_accumulated(rank: int) -> None:
    """And weight decay is added once."""
    found = []
    for exchange in ("dense", ALL):
        mine = Training(exchange, lr=0.1, momentum=0.9, weight_decay=0.3)
        for step in range(3):
            mine.optimizer.zero_grad()
            with mine.model.no_sync():
                mine.backward(2 * step)
            mine.backward(2 * step + 1)
            mine.optimizer.step()
        found.append(mine.close())
    assert apart(*found) < 1e-6


@on_ranks(2)
def test_clipping(rank: int) -> None:
    """The norm is that of what has arrived."""
    for spec in (GTopK(1.0), *WAYS):
        mine = Training(spec, lr=0.1)
        norms: list[torch.Tensor] = []

        def clip(mine: Training = mine, norms: list[torch.Tensor] = norms) -> None:
            norms.append(mine.model.clip_grad_norm_(0.01))

        before = copied(mine.inner.state_dict())
        mine.steps(0, before=clip)
        after = mine.model.state_dict()
        moved = sum(float((after[k] - before[k]).square().sum()) for k in before) ** 0.5
        assert float(norms[0]) > 0.01
        assert moved == pytest.approx(0.1 * 0.01, rel=1e-3)
        mine.close()


@on_ranks(2)
def test_no_gradients_at_step(rank: int) -> None:
    for spec in (ALL, *WAYS):
        mine = Training(spec, lr=0.1, momentum=0.9).steps(0)
        before = copied(mine.model.state_dict())
        mine.backward(1)
        mine.optimizer.zero_grad()
        mine.optimizer.step()
        assert same(mine.model.state_dict(), before)
        mine.steps(2)
        mine.close()


@on_ranks(2)
def test_two_steps_with_the_same_gradients(rank: int) -> None:
    for spec in (ALL, GTopK(1.0, mode="gtopk"), *WAYS):
        mine = Training(spec, lr=0.25).steps(0)
        states = [copied(mine.model.state_dict())]
        mine.backward(1)
        for _ in range(2):
            mine.optimizer.step()
            states.append(copied(mine.model.state_dict()))
        first, second = ({k: b[k] - a[k] for k in a} for a, b in pairwise(states))
        assert any(x.any() for x in first.values())
        assert apart(first, second) < 1e-6
        mine.close()


@on_ranks(2)
def test_a_step_may_be_left_out(rank: int) -> None:
    mine = Training(FEW, lr=0.1, momentum=0.9).steps(0)
    before = copied(mine.model.state_dict())
    mine.backward(1)
    mine.optimizer.zero_grad()
    mine.backward(2)
    assert same(mine.inner.state_dict(), before)
    mine.optimizer.step()
    mine.steps(3)
    mine.close()


# ---- schedules -----------------------------------------------------------------------------------
@on_ranks(2)
def test_schedules_that_send_layers_whole(rank: int) -> None:
    for name in ("us-byte", "c-cube", "bytescheduler"):
        mine = Training(FEW, policy=name, measured=True, lr=0.1)
        said = error_of(lambda mine=mine: mine.backward(0))
        assert "schedule must be auto or one of ddp, wfbp, mg-wfbp, asc-wfbp, not " + name in said
        mine.model.close()
    cut = Training(FEW, policy="bytescheduler", lr=0.1)
    said = error_of(lambda: cut.backward(0))
    assert (
        "GTopK sends layers whole, with their neighbours; schedule bytescheduler does not" in said
    )
    for policy, lanes in (("ddp", 1), ("wfbp", 1), ("mg-wfbp", 1), ("asc-wfbp", 2)):
        mine = Training(FEW, policy=policy, lr=0.1, momentum=0.9).steps(0, 1, 2)
        assert not mine.model.program.chained
        assert mine.model.program.lanes <= lanes
        mine.close()


@on_ranks(2)
def test_schedules_that_are_measured(rank: int) -> None:
    for name in ("auto", "mg-wfbp"):
        mine = Training(FEW, policy=name, measured=True, lr=0.1, momentum=0.9)
        mine.steps(*range(22))
        assert mine.model.schedule is not None
        assert not mine.model.program.chained
        assert mine.sparse.steps == 22
        mine.close()
