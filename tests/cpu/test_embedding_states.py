"""States of a `ShardedEmbedding` and its optimizer: those of `nn.Embedding`, for any number of
ranks. Each case runs on two ranks if not said otherwise."""

from __future__ import annotations

import copy
import pickle
import time
from functools import partial
from typing import Any

import pytest
import torch
from embedding_training import (
    SPARSE,
    WIDTH,
    WORDS,
    Pair,
    built,
    imported,
    linear,
    lstm,
    optimizers_for,
    plain,
    sentences,
    stepped,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training_models import apart, copied, error_of, on_all, same

from linkweave import ShardedEmbedding, collectives, prefetch
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


# ---- the model -----------------------------------------------------------------------------------
@on_ranks(2)
def test_states_are_those_of_one_process(rank: int) -> None:
    """They load into it and from it, right after a step."""
    pair = Pair("sparse adam")
    for number, (mine, whole) in enumerate(pair.batches(range(4), ahead=True)):
        pair.step(mine, whole)
        state = pair.model.state_dict()
        assert list(state) == list(pair.alone.state_dict())
        assert state["words.weight"].shape == (WORDS, WIDTH)
        fresh = built(linear, plain)
        fresh.load_state_dict(state)
        assert same(fresh.state_dict(), state)
        if number == 1:  # while a batch is announced
            generator = torch.Generator().manual_seed(number)
            changed = {
                k: torch.randn(v.shape, generator=generator).double() for k, v in state.items()
            }
            pair.model.load_state_dict(changed)
            pair.alone.load_state_dict(changed)
    pair.close()


@on_ranks(2)
def test_parts_of_states(rank: int) -> None:
    """Of the embedding itself; with `assign`; of another shape; without its weight."""
    torch.manual_seed(1)
    embedding = ShardedEmbedding(WORDS, WIDTH)
    torch.manual_seed(1)
    want = nn.Embedding(WORDS, WIDTH)
    assert same(embedding.state_dict(), want.state_dict())
    assert list(embedding.state_dict(prefix="a.")) == ["a.weight"]
    held = embedding.weight
    other = {"weight": torch.arange(WORDS * WIDTH).view(WORDS, WIDTH).float()}
    for assign in (False, True):
        embedding.load_state_dict(other, assign=assign)
        assert embedding.weight is held
        assert same(embedding.state_dict(), other)
    assert not embedding.state_dict()["weight"].requires_grad
    columns = slice(*embedding.columns)
    for wrong in (torch.zeros(WORDS, WIDTH + 1), torch.zeros(WORDS - 1, WIDTH)):
        said = error_of(
            lambda wrong=wrong: embedding.load_state_dict({"weight": wrong}), RuntimeError
        )
        assert "size mismatch for weight" in said
    assert "Missing key" in error_of(lambda: embedding.load_state_dict({}), RuntimeError)
    assert torch.equal(embedding.weight, other["weight"][:, columns])
    embedding.reset_parameters()
    assert apart(embedding.state_dict(), other) > 1
    embedding.close()


@on_ranks(2)
def test_the_state_does_not_change_later(rank: int) -> None:
    pair = Pair("sgd")
    pair.train(0, 1)
    state = pair.model.state_dict()
    before = state["words.weight"].clone()
    pair.train(2)
    assert torch.equal(state["words.weight"], before)
    pair.close()


@on_ranks(2)
def test_dtypes_and_constructions(rank: int) -> None:
    """Float64 at once or later; the default dtype."""
    torch.manual_seed(1)
    later = ShardedEmbedding(WORDS, WIDTH).double()
    assert later.weight.dtype == later(torch.tensor([0])).dtype == torch.float64
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    at_once = ShardedEmbedding(WORDS, WIDTH, dtype=torch.float32)
    assert same(at_once.double().state_dict(), later.state_dict())
    assert ShardedEmbedding(1, 1).weight.dtype == torch.float64
    torch.set_default_dtype(torch.float32)


@on_ranks(2)
def test_copies_are_refused(rank: int) -> None:
    pair = Pair("sgd")
    words = (
        "a ShardedEmbedding cannot be copied, as its columns are on all ranks: construct another"
    )
    for copied_by in (copy.deepcopy, copy.copy, pickle.dumps):
        assert words in error_of(partial(copied_by, pair.inner.words))
    assert words in error_of(lambda: copy.deepcopy(pair.inner))
    pair.train(0)
    pair.close()


@on_ranks(2)
def test_a_closed_training_may_be_followed_by_another(rank: int) -> None:
    pair = Pair("sparse adam")
    kinds = [type(optimizer) for optimizer in pair.alone_optimizers]
    for _ in range(2):
        assert [type(optimizer) for optimizer in pair.optimizers] != kinds
        pair.train(0, 1)
        pair.check()
        pair.model.close()
        assert [type(optimizer) for optimizer in pair.optimizers] == kinds
        state = copied(pair.inner.state_dict())
        pair.model = collectives.DataParallel(pair.inner, pair.optimizers, schedule="wfbp")
        assert same(pair.inner.state_dict(), state)
    pair.close()


@on_ranks(2)
def test_close_completes_the_last_step(rank: int) -> None:
    """Also rows that nobody needs next."""
    pair = Pair("sgd")
    for mine, _ in pair.batches(range(2), ahead=True):
        stepped(mine, pair.model, pair.optimizers, 2)
        lane = pair.embeddings[0].schedule.lane
        lane.submit("slow", partial(time.sleep, 0.05))
    pair.model.close()
    assert not [op for op in lane._going if not op.done()]
    pair.end()


# ---- the optimizer -------------------------------------------------------------------------------
def trained(
    kind: str, steps: range, saved: Any = None, early: bool = False
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(model's and optimizers' states, the state some steps later). What was `saved` is loaded
    before or after DataParallel takes the optimizers."""
    pair = Pair(kind, lstm)
    if early:
        pair.model.close()
    if saved:
        pair.model.load_state_dict(saved[0])
        for optimizer, state in zip(pair.optimizers, saved[1], strict=True):
            optimizer.load_state_dict(state)
    if early:
        pair.model = collectives.DataParallel(pair.inner, pair.optimizers, schedule="wfbp")
    found: Any = None
    batches = [pair.share(step) for step in steps]
    for number, mine in enumerate(prefetch(batches)):
        if number == 2:
            model = copied(pair.model.state_dict())
            found = model, [copy.deepcopy(o.state_dict()) for o in pair.optimizers]
        stepped(mine, pair.model, pair.optimizers, pair.size)
    state = copied(pair.model.state_dict())
    assert on_all(pair.group, state)
    pair.end()
    return found, state


def resumed(rank: int, kind: str, saved: Any, early: bool) -> dict[str, torch.Tensor]:
    return trained(kind, range(2, 5), saved, early)[1]


def whole(rank: int, kind: str) -> Any:
    return trained(kind, range(5))


def alone(kind: str, saved: Any) -> dict[str, torch.Tensor]:
    """One process that resumes, with `nn.Embedding`."""
    model = built(lstm, plain)
    optimizers = optimizers_for(model, kind)
    model.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    for step in range(2, 5):
        stepped(sentences(step), model, optimizers)
    return model.state_dict()


@pytest.mark.parametrize("kind", [*SPARSE, "one"])
def test_training_is_resumed(kind: str) -> None:
    """To the bit on the same ranks; on others, and in one process, as it would have gone on."""
    found = collectives.spawn(whole, 2, args=(kind,), timeout=60)
    saved, end = found[0]
    for (_, mine), (_, its) in zip(saved[1], found[1][0][1], strict=False):
        assert mine == its
    for size, early in ((2, False), (2, True), (3, False), (1, False)):
        again = collectives.spawn(resumed, size, args=(kind, saved, early), timeout=60)
        assert same(again[0], end) or size != 2
        assert apart(again[0], end) < 1e-12
    assert apart(alone(kind, saved), end) < 1e-12


@on_ranks(2)
def test_optimizer_states_are_those_of_one_process(rank: int) -> None:
    for kind in SPARSE:
        pair = Pair(kind)
        pair.train(0, 1, 2)
        found, want = (side[1][1].state_dict() for side in pair.sides)
        assert {k: v for k, v in found["state"].items() if v} == {} or kind != "sgd"
        for number, rows in want["state"].items():
            assert rows.keys() == found["state"][number].keys()
            for name, value in rows.items():
                mine = found["state"][number][name]
                assert type(mine) is type(value)
                assert torch.allclose(
                    torch.as_tensor(mine), torch.as_tensor(value), rtol=0, atol=1e-12
                )
        assert found["param_groups"] == want["param_groups"]
        fresh = SPARSE[kind]([built(linear, plain).words.weight])
        fresh.load_state_dict(found)
        pair.alone_optimizers[1].load_state_dict(found)
        pair.optimizers[1].load_state_dict(want)
        pair.train(3, 4)
        pair.close()


@on_ranks(2)
def test_distributed_checkpoints_take_and_give_states(rank: int) -> None:
    """By the names of parameters, of two optimizers; torch takes none that has no state."""
    for kind in ("adagrad", "sparse adam"):
        pair = Pair(kind)
        pair.train(0, 1, 2)
        for model, optimizers, _ in pair.sides:
            state = get_optimizer_state_dict(model, optimizers)
            set_optimizer_state_dict(model, optimizers, state)
        pair.train(3, 4)
        pair.close()


@on_ranks(2)
def test_a_state_of_another_table_is_refused(rank: int) -> None:
    pair = Pair("sparse adam")
    pair.train(0, 1)
    state = pair.optimizers[1].state_dict()
    own = {name: x[..., :1] if torch.as_tensor(x).dim() else x
           for name, x in state["state"][0].items()}  # fmt: skip
    said = error_of(lambda: pair.optimizers[1].load_state_dict({**state, "state": {0: own}}))
    assert f"of parameter 0 has shape ({WORDS}, 1), and its ShardedEmbedding" in said
    pair.train(2)
    pair.close()


@on_ranks(2)
def test_a_state_of_the_start_is_loaded(rank: int) -> None:
    """One without entries."""
    for kind in SPARSE:
        pair = Pair(kind)
        fresh = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.alone_optimizers]
        start = copied(pair.alone.state_dict())
        pair.train(0, 1)
        for model, optimizers, _ in pair.sides:
            model.load_state_dict(start)
            for optimizer, state in zip(optimizers, fresh, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        pair.train(2, 3)
        pair.close()
