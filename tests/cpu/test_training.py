"""`DataParallel` trains as one process does, by every policy, and carries out its program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import (
    MODELS,
    OPTIMIZERS,
    adamw,
    apart,
    copied,
    made,
    on_all,
    same,
    schedule_for,
    schedules,
    sgd,
    train,
    wrong_order,
)

import linkweave
from linkweave import collectives
from linkweave.collectives import DataParallel, overlap
from linkweave.collectives.overlap import Schedule

State = dict[str, torch.Tensor]


def alone(name: str, kind: str, steps: int, size: int) -> State:
    """One process that trains on the batches of all ranks."""
    model = made(name)
    train(name, model, OPTIMIZERS[kind](model.parameters()), range(steps), each=2 * size)
    return copied(model.state_dict())


def together(name: str, kind: str, steps: int, schedule: Schedule, check: bool = True) -> State:
    """The state of this rank after training; raises unless the program was carried out."""
    comm = collectives.get_default()
    inner = made(name)
    optimizer = OPTIMIZERS[kind](inner.parameters())
    with DataParallel(inner, optimizer, schedule=schedule) as model:
        train(name, model, optimizer, range(steps), comm.rank, comm.size)
        if check:
            assert wrong_order(model) == []
        state = copied(model.state_dict())
    assert on_all(comm, state)
    return state


def every_policy(
    rank: int, plans: dict[str, dict[str, Schedule]], kinds: dict[str, list[str]], steps: int
) -> dict[str, float]:
    """How far each model is from one process; raises unless all policies give the same bits."""
    size, found = collectives.get_default().size, {}
    for name, made_for in plans.items():
        for kind in kinds[name]:
            first: State = {}
            for policy, schedule in made_for.items():
                for chained in (False, True):
                    planned = replace(schedule, chained=chained)
                    state = together(name, kind, steps, planned, check=size > 1)
                    first = first or state
                    assert same(state, first), (name, kind, policy, chained)
            found[f"{name} {kind}"] = apart(first, alone(name, kind, steps, size))
    return found


ALL = {name: ["sgd", "adamw"] for name in MODELS}
SOME = {"cnn": ["sgd"], "transformer": ["adamw"], "partial": ["adamw"]}


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Schedule]]:
    return {name: schedules(name) for name in MODELS}


@pytest.mark.parametrize(
    ("size", "kinds", "steps"), [(1, SOME, 2), (2, ALL, 3), (3, SOME, 2), (5, SOME, 2), (8, SOME, 2)]
)
def test_every_policy_trains_as_one_process(
    plans: Any, size: int, kinds: dict[str, list[str]], steps: int
) -> None:
    args = (plans, kinds, steps)
    found = collectives.spawn(every_policy, size, args=args, timeout=20, order="fixed")
    assert len(found[0]) == sum(map(len, kinds.values()))
    assert max(found[0].values()) < 1e-10  # Adam divides gradients of 1e-17 by 1e-8
