"""Updates of gTop-k S-SGD: those of a plain reference to the bit, and where all is sent, those of
dense training. Each case runs on several ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from gtopk_reference import Reference
from gtopk_training import ALL, SGD, Training, schedule, small
from training_models import adamw, apart, error_of, imported, same

from linkweave import GTopK
from linkweave.collectives.training import tuner
from linkweave.collectives.training.tuner import SPARSE
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.2}, {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "maximize": True},
]  # fmt: skip


# ---- a few entries -------------------------------------------------------------------------------
@on_ranks(2, 3, pytest.param(5, marks=pytest.mark.slow))
def test_training_is_the_references_to_the_bit(rank: int, size: int) -> None:
    by_bucket = product(OPTIONS, ("bucket",), ("gtopk",))
    every = (*by_bucket, *product(OPTIONS[1:3], ("unit",), ("gtopk", "topk")))
    for number, (options, per, mode) in enumerate(every):
        conserve = number % 2 == 1
        spec = GTopK(0.02, (0.3, 0.1), 3, per=per, mode=mode, conserve=conserve)
        policy = "ddp" if per == "unit" else "wfbp"  # one op of all units, an op of each
        mine = Training(spec, policy=policy, **options).steps(*range(20))
        inner = small()
        reference = Reference(inner, schedule(policy), spec, size, **options)
        for _ in range(20):
            reference.step()
        (residual,) = mine.sparse._residuals
        assert torch.equal(residual, torch.from_numpy(reference.residual[rank]))
        assert same(mine.close(), inner.state_dict())


@on_ranks(2)
def test_each_all_reduce_sends_its_share(rank: int) -> None:
    for per in ("bucket", "unit"):
        for policy, ops in (("wfbp", 3), ("ddp", 1)):
            mine = Training(GTopK(0.02, per=per, mode="topk"), policy=policy, lr=0.1)
            mine.steps(0, 1)
            program = mine.model.program
            assert len(program.ops) == ops
            for op in program.ops:
                counts = op.sizes(4) if per == "unit" else [op.nbytes // 4]
                k = sum(max(1, round(0.02 * count)) for count in counts)
                units = mine.model._engine.units
                grads = [p.grad for unit in op.needs for p in units[unit].parameters]
                assert k <= sum(int(grad.count_nonzero()) for grad in grads) <= 2 * k
            mine.close()


# ---- all entries ---------------------------------------------------------------------------------
@on_ranks(1, 2, 3)
def test_what_sends_everything_trains_as_dense(rank: int) -> None:
    for options in OPTIONS:
        want = Training("dense", **options).steps(*range(6)).close()
        for mode in ("auto", "gtopk", "topk"):
            every = GTopK(1.0, mode=mode)
            assert same(Training(every, **options).steps(*range(6)).close(), want)
    want = Training("dense", adamw).steps(*range(5)).close()
    found = Training(GTopK(1.0), adamw).steps(*range(5)).close()
    assert same(found, want)


@on_ranks(2)
def test_auto_measures_and_tries_without_a_trace(rank: int) -> None:
    steps = range(tuner.SETTLED + 2)
    want = Training("dense", lr=0.1).steps(*steps).close()
    for mode in ("gtopk", "auto"):
        spec = GTopK(1.0, mode=mode)
        mine = Training(spec, policy="auto", measured=True, lr=0.1).steps(*steps)
        assert mine.model.schedule.policy in (*SPARSE, "after-backward")
        assert not mine.model.program.chained
        assert not any(bool(x.any()) for x in mine.sparse._residuals)
        assert apart(mine.close(), want) < 1e-5


@on_ranks(2)
def test_a_momentum_that_is_set_to_zero_is_no_longer_nesterovs(rank: int) -> None:
    states = []
    for exchange in ("dense", ALL):
        mine = Training(exchange, lr=0.1, momentum=0.9, nesterov=True).steps(0, 1)
        mine.optimizer.param_groups[0]["momentum"] = 0.0
        states.append(mine.steps(2, 3).close())
    assert apart(*states) < 1e-6


class Signs(torch.optim.Optimizer):
    """Not one of torch's; its groups have no `lr`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rate": 0.01})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["rate"] * parameter.grad.sign()


class Hooked(SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.5)


@on_ranks(2)
def test_other_optimizers_have_their_own_step(rank: int) -> None:
    for optimizer in (Signs, Hooked):
        mine, other = Training(GTopK(1.0), optimizer), Training("dense", optimizer)
        for step in range(4):
            states = [one.steps(step).model.state_dict() for one in (mine, other)]
            assert same(*states)
        mine.close()
        other.close()


@on_ranks(2)
def test_groups_of_parameters(rank: int) -> None:
    def groups(parameters: Any, **options: Any) -> Any:
        first, second, *others = parameters
        return SGD(
            [{"params": [first], "lr": 0.3}, {"params": [second], "weight_decay": 0.1},
             {"params": others, "lr": 0.02, "weight_decay": 0.2}], **options
        )  # fmt: skip

    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    want = Training("dense", groups, **options).steps(*range(6)).close()
    assert apart(Training(ALL, groups, **options).steps(*range(6)).close(), want) < 1e-6
    sparse = Training(GTopK(1.0, mode="gtopk"), groups, **options)
    one = GTopK(1.0, mode="topk", per="unit")
    found = Training(one, groups, **options).steps(*range(2)).close()
    assert apart(sparse.steps(*range(2)).close(), found) < 1e-6


@on_ranks(2)
def test_ranks_with_different_exchanges_raise(rank: int) -> None:
    for exchange in (GTopK(0.01 * (rank + 1)), ("dense", GTopK())[rank]):
        said = error_of(lambda e=exchange: Training(e, lr=0.1))
        assert "ranks 0 and 1 have different exchanges or options; this rank's is" in said
        assert repr(exchange) in said
