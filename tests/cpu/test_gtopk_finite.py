"""Gradients that are not finite under `GTopK`: all ranks skip the step. Two ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gtopk_reference import batch
from gtopk_training import Training, small
from torch.nn.functional import cross_entropy
from training_models import apart, copied, error_of, imported, same

from linkweave import GTopK
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        logging.getLogger("linkweave").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


class Poisoned(Training):
    """Some of whose gradients are not finite on this rank: by parameter, the value."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.poison: dict[str, float] = {}
        for name, parameter in self.inner.named_parameters():
            parameter.register_hook(lambda g, name=name: self.spoil(name, g))

    def spoil(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if name in self.poison:
            gradient.view(-1)[self.at(gradient)] = self.poison[name]
        return gradient

    def at(self, x: torch.Tensor) -> int:
        """Which element is poisoned: in some tensors the first, in others the last."""
        return 0 if x.numel() % 2 else x.numel() - 1

    def finite(self, step: int) -> dict[str, torch.Tensor]:
        """The gradients of all ranks added up, without what is not finite."""
        alone = small()
        alone.load_state_dict(self.inner.state_dict())
        x, y = batch(step, self.comm.rank, 2)
        cross_entropy(alone(x), y).backward()
        found = {}
        for name, parameter in alone.named_parameters():
            g = self.spoil(name, parameter.grad)
            g[~g.isfinite()] = 0
            self.comm.allreduce(g)
            found[name] = g
        return found

    def kept(self) -> dict[str, torch.Tensor]:
        """The residuals of all ranks added up, without those to which it is added."""
        found: dict[str, torch.Tensor] = self.sparse.state_dict()["residual"]
        for name, x in found.items():
            if name in self.poison:
                x.view(-1)[self.at(x)] = 0
            self.comm.allreduce(x)
        return found


EVERY = [name for name, _ in small().named_parameters()]
POISON: list[tuple[dict[str, float], dict[str, float]]] = [
    ({}, {"1.weight": float("inf")}),
    ({"1.weight": float("inf"), "5.bias": float("nan")}, {"1.weight": -float("inf")}),
    ({"3.bias": float("nan")}, {"5.weight": float("nan"), "1.bias": float("inf")}),
    ({}, dict.fromkeys(EVERY, float("nan"))), tuple([dict.fromkeys(EVERY, float("nan"))] * 2),
]  # fmt: skip


def poisoned(spec: GTopK, policy: str, rank: int) -> None:
    heard = Heard()
    mine = Poisoned(spec, policy=policy, lr=0.1)
    mine.steps(0, 1)
    steps = 2
    for poison in POISON:
        for _ in range(2):
            mine.poison = poison[rank]
            before, had = copied(mine.model.state_dict()), mine.kept()
            heard.words.clear()
            want = mine.finite(steps)
            mine.steps(steps)
            assert same(mine.model.state_dict(), before)
            assert mine.sparse.steps == 2 + POISON.index(poison)
            skipped = [words for words in heard.words if "a step is skipped" in words]
            assert len(skipped) == 1
            shared = mine.comm.allgather(torch.tensor([hash(skipped[0])]))
            assert shared[0] == shared[1]
            if spec.density > 0.02:
                names = set(skipped[0].rpartition(": ")[2].split(", "))
                assert names == {*poison[0], *poison[1]}
            own = [words for words in heard.words if f"rank {rank}: the gradient" in words]
            named = {name for words in own for name in words.rpartition(": ")[2].split(", ")}
            assert named == {*poison[rank]}
            assert all(x.isfinite().all() for x in mine.sparse.state_dict()["residual"].values())
            mine.poison = {}
            wanted = {k: had[k] + want[k] for k in want}
            if spec.density == 1:  # a dense average loses what others have of such an element
                for name in {*poison[0], *poison[1]}:
                    wanted[name].view(-1)[mine.at(wanted[name])] = 0
            assert apart(mine.kept(), wanted) < 1e-5
            steps += 1
        mine.poison = {}
        before = copied(mine.model.state_dict())
        mine.steps(steps)
        after = mine.model.state_dict()
        assert not same(after, before)
        assert all(x.isfinite().all() for x in after.values())
        steps += 1
    mine.close()
    logging.getLogger("linkweave").removeHandler(heard)


SHARES = [(0.05, "gtopk"), (1.0, "auto"), (0.05, "topk"), (1e-6, "gtopk")]


@on_ranks(2)
def test_gradients_that_are_not_finite(rank: int) -> None:
    for density, mode in SHARES:
        for per, policy in (("bucket", "wfbp"), ("bucket", "ddp"), ("unit", "ddp")):
            poisoned(GTopK(density, per=per, mode=mode), policy, rank)


@on_ranks(2)
def test_what_looks_at_gradients_sees_it(rank: int) -> None:
    """As after a dense average: the norm is NaN. An unknown scaler is refused."""
    for spec in (GTopK(0.05), GTopK(1.0)):
        mine = Poisoned(spec, lr=0.1).steps(0)
        mine.poison = {"3.weight": float("nan")} if rank else {}
        mine.optimizer.zero_grad()
        mine.backward(1)
        assert mine.inner[3].weight.grad.isnan().all()
        assert not mine.inner[3].bias.grad.any()
        assert mine.model.clip_grad_norm_(1.0).isnan()
        mine.optimizer.step()
        mine.poison = {}
        assert all(x.isfinite().all() for x in mine.steps(2).close().values())
        for unscales in (True, False):
            mine = Training(spec, lr=0.1)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(mine.loss(0)).backward()
            if unscales:
                scaler.unscale_(mine.optimizer)
            said = error_of(lambda mine=mine, scaler=scaler: scaler.step(mine.optimizer))
            assert "a GradScaler does not work with GTopK" in said


@on_ranks(2)
def test_none_is_finite_for_many_steps(rank: int) -> None:
    mine = Poisoned(GTopK(0.05, warmup=(0.5,), epoch_steps=2), lr=0.1, momentum=0.9).steps(0)
    before = copied(mine.model.state_dict())
    mine.poison = {"3.weight": float("nan")} if rank else {}
    mine.steps(*range(1, 41))
    assert same(mine.model.state_dict(), before)
    assert mine.sparse.steps == 1
    state = mine.sparse.state_dict()
    assert all(x.isfinite().all() for x in state["residual"].values())
    assert max(float(x.abs().max()) for x in state["residual"].values()) < 100
    mine.poison = {}
    mine.steps(41, 42)
    assert all(x.isfinite().all() for x in mine.close().values())
