"""Training with `GTopK` that is saved and goes on: to the bit, or on another number of ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gtopk_training import ALL, SGD, Training
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from training_models import apart, copied, error_of, imported, same

from linkweave import DataParallel, GTopK, collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.training.gtopk.options import KEY, keep_in, kept_in, resharded
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
SPEC = GTopK(0.03, warmup=(0.3, 0.1), epoch_steps=2)
HEAVY = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def saved(mine: Training, path: Path) -> None:
    """All that a rank needs to go on."""
    state = {"model": mine.model.state_dict(), "optimizer": mine.optimizer.state_dict()}
    torch.save(state, path / str(mine.comm.rank))


def state_of(path: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path / str(rank), weights_only=True)
    return found


def load(mine: Training, state: dict[str, Any]) -> Training:
    mine.model.load_state_dict(state["model"])
    mine.optimizer.load_state_dict(state["optimizer"])
    return mine


def everything(mine: Training) -> dict[str, torch.Tensor]:
    """Parameters, and what the exchange keeps."""
    state = kept_in(mine.optimizer.state_dict())
    return copied(mine.model.state_dict()) | {
        f"residual {name}": x for name, x in state["residual"].items()
    } | {"steps": torch.tensor(state["steps"])}  # fmt: skip


# ---- the same ranks ------------------------------------------------------------------------------
def begin(rank: int, path: Path, spec: GTopK, options: dict[str, Any]) -> Any:
    mine = Training(spec, **options).steps(*range(3))
    saved(mine, path)
    mine.steps(*range(3, 8))
    found = everything(mine)
    mine.close()
    return found


def go_on(rank: int, path: Path, spec: GTopK, options: dict[str, Any], when: str) -> Any:
    mine = Training(spec, **options)
    if when == "late":
        mine.steps(5, 6)
    if when == "before DataParallel":
        mine.model.close()
    load(mine, state_of(path, rank))
    if when == "before DataParallel":
        mine.wrap(spec)
    mine.steps(*range(3, 8))
    found = everything(mine)
    mine.close()
    return found


@pytest.mark.parametrize("options", [HEAVY, {"lr": 0.1}], ids=["momentum", "plain"])
def test_training_goes_on_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """In other processes, after steps of another training, or of an optimizer yet to be wrapped."""
    spec = SPEC
    want = collectives.spawn(begin, 3, args=(tmp_path, spec, options), timeout=60)
    for when in ("at once", "late", "before DataParallel"):
        found = collectives.spawn(go_on, 3, args=(tmp_path, spec, options, when), timeout=60)
        assert all(same(a, b) for a, b in zip(found, want, strict=True))
    assert int(want[0]["steps"]) == 8
    assert not same(want[0], want[1])  # residuals are a rank's own


@on_ranks(2)
def test_states_before_the_first_pass(rank: int) -> None:
    """What was loaded is what is saved."""
    mine = Training(SPEC, **HEAVY)
    nothing = kept_in(mine.optimizer.state_dict())
    assert nothing["steps"] == 0
    assert nothing["residual"].keys() == dict(mine.model.named_parameters()).keys()
    assert not any(x.any() for x in nothing["residual"].values())
    mine.steps(0, 1)
    state = mine.optimizer.state_dict()
    other = Training(SPEC, **HEAVY)
    other.optimizer.load_state_dict(state)
    again = kept_in(other.optimizer.state_dict())
    assert same(again["residual"], kept_in(state)["residual"])
    kept = mine.sparse.state_dict()["residual"]
    mine.steps(2)
    assert same(kept, kept_in(state)["residual"])  # a state is a copy
    mine.model.close()
    other.model.close()


@on_ranks(2)
def test_states_of_training_without_an_exchange(rank: int) -> None:
    """What the exchange keeps is dropped; the optimizer's momentum goes on."""
    dense = Training("dense", **HEAVY).steps(0, 1, 2)
    state = {"model": dense.model.state_dict(), "optimizer": dense.optimizer.state_dict()}
    state = torch.load(_through(state), weights_only=True)
    dense.steps(*range(3, 8))
    want = dense.close()
    for late in (False, True):
        mine = Training(ALL, **HEAVY)
        if late:
            mine.steps(6, 7)
        load(mine, copy.deepcopy(state)).steps(*range(3, 8))  # torch's optimizers share tensors
        assert apart(mine.close(), want) < 1e-6
    few = Training(SPEC, **HEAVY).steps(0, 1)
    few.optimizer.load_state_dict(state["optimizer"])
    few.steps(3)
    assert few.sparse.steps == 1
    few.close()
    mine = Training(SPEC, **HEAVY).steps(0, 1)
    dense = Training("dense", **HEAVY)  # and the other way round
    dense.optimizer.load_state_dict(mine.optimizer.state_dict())
    dense.steps(0).close()
    mine.model.close()


def _through(state: Any) -> Any:
    from io import BytesIO

    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@on_ranks(2)
def test_states_that_do_not_fit(rank: int) -> None:
    mine = Training(SPEC, **HEAVY).steps(0, 1)
    state = mine.optimizer.state_dict()
    for changes, words in (
        ({"rank": 1 - rank}, f"is that of rank {1 - rank} of 2, not of rank {rank} of 2"),
        ({"size": 3}, f"of rank {rank} of 3, not of rank {rank} of 2: load each rank's own, or"),
        ({"residual": {"9.weight": torch.ones(3)}}, "a residual for 9.weight, which this model"),
        ({"residual": {"1.bias": torch.ones(3)}},
         "a residual of shape (3,) for 1.bias, which has shape (12,)"),
    ):  # fmt: skip
        other = {**state}
        keep_in(other, {**kept_in(state), **changes})
        said = error_of(lambda other=other: mine.optimizer.load_state_dict(other))
        assert words in said
        fresh = Training(SPEC, **HEAVY)

        def first(fresh: Training = fresh, other: Any = other) -> None:
            fresh.optimizer.load_state_dict(other)
            fresh.backward(0)

        assert words in error_of(first)
        fresh.model.close()
    mine.steps(2)
    mine.close()


# ---- torch.distributed.checkpoint ----------------------------------------------------------------
def in_group(rank: int, path: Path, size: int, work: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()


def on_group(size: int, path: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work` returns on each rank of a process group that meets at `path`."""
    return collectives.spawn(in_group, size, args=(path, size, work, *args), timeout=60)


def state_in(mine: Training, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(mine.model, mine.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def checkpoint(path: Path, flat: bool) -> Any:
    mine = Training(SPEC, **HEAVY).steps(*range(3))
    dcp.save(state_in(mine, flat), checkpoint_id=path)
    return everything(mine.steps(*range(3, 8))), mine.close()


def resume(path: Path, flat: bool) -> Any:
    mine = Training(SPEC, **HEAVY)
    state = state_in(mine, flat)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        mine.model, mine.optimizer, model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )  # fmt: skip
    return everything(mine.steps(*range(3, 8))), mine.close()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_distributed_checkpoint_has_all_ranks_residuals(flat: bool, tmp_path: Path) -> None:
    """Of a training that begins anew, on as many ranks; on another number it is an error."""
    path = tmp_path / "checkpoint"
    want = on_group(2, tmp_path / "a", checkpoint, path, flat)
    found = on_group(2, tmp_path / "b", resume, path, flat)
    for ours, theirs in zip(found, want, strict=True):
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not same(want[0][0], want[1][0])
    if not flat:
        file = tmp_path / "whole.pt"
        dcp_to_torch_save(path, file)
        whole = torch.load(file, weights_only=True)["optimizer"]
        three = [kept_in(one, rank, 3) for rank, one in enumerate(resharded([whole] * 2, 3))]
        two = [kept_in(whole, rank, 2) for rank in range(2)]
        for name in two[0]["residual"]:
            sums = [sum(one["residual"][name] for one in every) for every in (two, three)]
            assert torch.equal(*sums)
        with pytest.raises(CheckpointException, match="rank 0 of 3"):
            on_group(3, tmp_path / "c", resume, path, flat)


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("size", [1, 2])
def test_what_was_not_sent_is_not_dropped_in_silence(size: int, early: bool) -> None:
    """Loaded before or after DataParallel takes the optimizer; and it is not saved again."""

    def work(rank: int) -> list[str]:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        state = optimizer.state_dict()
        keep_in(state, {"rank": rank, "size": size, "steps": 1, "residual": {}})
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("linkweave").addHandler(handler)
        if early:
            optimizer.load_state_dict(state)
        with DataParallel(model, optimizer):
            if not early:
                optimizer.load_state_dict(state)
            assert KEY not in optimizer.state_dict()["param_groups"][0]
        return said

    for said in collectives.spawn(work, size):
        assert ["drops the gradients" in words for words in said] == [True]


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_model_that_shares_the_optimizer_takes_nothing(early: bool) -> None:
    """A dense one, which DataParallel gets first."""

    def work(rank: int) -> list[int]:
        one, other = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1))
        optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1)
        state, zeros = optimizer.state_dict(), {"0.weight": torch.ones(1, 2)}
        keep_in(state, {"rank": rank, "size": 2, "steps": 7, "residual": zeros})
        if early:
            optimizer.load_state_dict(state)
        with DataParallel(one, optimizer), DataParallel(other, optimizer, exchange=SPEC):
            if not early:
                optimizer.load_state_dict(state)
            return [kept_in(optimizer.state_dict())["steps"]]

    assert collectives.spawn(work, 2) == [[7], [7]]


def test_optimizers_in_another_order() -> None:
    def work(rank: int) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        first, second = (SGD(part.parameters(), lr=0.1) for part in model)
        state = second.state_dict()
        keep_in(state, {"rank": rank, "size": 2, "steps": 7, "residual": {}})
        with DataParallel(model, [first, second], exchange=SPEC):
            said = [error_of(lambda: second.load_state_dict(state))]
        second.load_state_dict(state)
        return [*said, error_of(lambda: DataParallel(model, [first, second], exchange=SPEC))]

    for said in collectives.spawn(work, 2):
        assert all("in the order of the training that saved it" in words for words in said), said


@on_ranks(2)
def test_a_closed_training_leaves_a_plain_optimizer(rank: int) -> None:
    mine = Training(SPEC, **HEAVY).steps(0, 1)
    mine.model.close()
    assert type(mine.optimizer) is SGD
    assert KEY not in mine.optimizer.state_dict()["param_groups"][0]
    assert KEY not in mine.optimizer.param_groups[0]
    mine.wrap(SPEC)
    mine.steps(2)
    assert mine.sparse.steps == 1
    mine.close()


# ---- other ranks ---------------------------------------------------------------------------------
def some(rank: int, path: Path) -> None:
    mine = Training(SPEC, **HEAVY).steps(*range(3))
    saved(mine, path)
    mine.model.close()


def others(rank: int, states: list[dict[str, Any]], late: bool) -> Any:
    mine = Training(SPEC, **HEAVY)
    if late:
        mine.steps(0)
    load(mine, states[rank])
    if not late:
        mine.model(torch.zeros(1, 64))
    found = everything(mine)
    mine.steps(*range(3, 6))
    assert mine.sparse.steps == 6
    mine.close()
    return found


@pytest.mark.parametrize(
    ("old", "new"), [(4, 3), (3, 4), pytest.param(2, 5, marks=pytest.mark.slow)]
)
def test_training_goes_on_with_other_ranks(old: int, new: int, tmp_path: Path) -> None:
    collectives.spawn(some, old, args=(tmp_path,), timeout=60)
    states = [state_of(tmp_path, rank) for rank in range(old)]
    made = resharded([state["optimizer"] for state in states], new)
    given = [{"model": states[0]["model"], "optimizer": one} for one in made]
    for late in (False, True):
        found = collectives.spawn(others, new, args=(given, late), timeout=60)
        for name in found[0]:
            if not name.startswith("residual"):
                assert all(torch.equal(one[name], found[0][name]) for one in found)
                continue
            key = name.removeprefix("residual ")
            want = sum(kept_in(state["optimizer"])["residual"][key] for state in states)
            assert torch.allclose(sum(one[name] for one in found), want, rtol=0, atol=1e-6)


def test_a_single_rank_cannot_take_what_was_not_sent(tmp_path: Path) -> None:
    collectives.spawn(some, 4, args=(tmp_path,), timeout=60)
    states = [state_of(tmp_path, rank)["optimizer"] for rank in range(4)]
    with pytest.raises(CollectiveError, match="a single rank trains without an exchange"):
        resharded(states, 1)


@on_ranks(2)
def test_residuals_of_frozen_parameters_stay(rank: int) -> None:
    """What was not sent of a parameter outlasts steps in which it is frozen."""
    mine = Training(SPEC, policy="auto", measured=True, **HEAVY).steps(0, 1, 2)
    name, parameter = next(iter(mine.inner.named_parameters()))
    before = kept_in(mine.optimizer.state_dict())["residual"][name].clone()
    parameter.requires_grad_(False)
    mine.steps(3)
    between = kept_in(mine.optimizer.state_dict())["residual"][name]
    assert before.any() and torch.equal(before, between)


@on_ranks(2)
def test_buffers_and_odd_shapes(rank: int) -> None:
    """Strides of channels last and parameters of no dimension go through a file."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
            self.body = nn.Sequential(conv, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale

    mine = Training(SPEC, make=Odd, **HEAVY).steps(0, 1, 2)
    given = torch.load(_through({"model": mine.model.state_dict(),
                                 "optimizer": mine.optimizer.state_dict()}))  # fmt: skip
    mine.steps(3, 4, 5)
    other = load(Training(SPEC, make=Odd, **HEAVY), given).steps(3, 4, 5)
    assert same(everything(mine), everything(other))
    mine.model.close()
    other.model.close()
