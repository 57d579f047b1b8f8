"""Training with a GradScaler: dense gradients, gTop-k and an embedding.

Scales are powers of two, so that a step has the bits of one without a scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from test_distributed import run
from test_gtopk_hook import Plain, noise
from torch import nn
from torch.nn import functional

from linkweave import DataParallel, GTopK, ShardedEmbedding, collectives, prefetch
from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed import GTopKState, gtopk_hook
from linkweave.collectives.training.gtopk.exchange import SparseAverage
from linkweave.collectives.training.update import LossScale
from tests.cpu.fake_ranks import FakeTransport

WORDS, STEPS = 30, 12
OVERFLOW = 7
"""The step in which a loss is too large for its scale."""


class Words(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = ShardedEmbedding(WORDS, width)
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, WORDS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Loop:
    """A training loop, with or without a scaler."""

    def __init__(
        self, exchange: Any, scaler: Any = None, adam: bool = False, clips: bool = False,
        accumulates: bool = False,
    ) -> None:  # fmt: skip
        inner = Words()
        self.table, self.head = inner.table, inner.head
        kind = torch.optim.SparseAdam if adam else torch.optim.SGD
        self.optimizers: list[Any] = [
            torch.optim.SGD(self.head.parameters(), 0.3, momentum=0.9),
            kind(self.table.parameters(), lr=0.1),
        ]
        self.model = DataParallel(
            inner, self.optimizers, schedule="wfbp", exchange=exchange, scaler=scaler
        )
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.clips, self.accumulates = clips, accumulates

    def backward(self, ids: torch.Tensor, factor: float = 1.0) -> None:
        loss = functional.cross_entropy(self.model(ids), (ids + 1) % WORDS)
        self.scaler.scale(loss * factor).backward()

    def step(self, ids: torch.Tensor, factor: float = 1.0) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.accumulates:
            with self.model.no_sync():
                self.backward(ids.roll(1)[:20])
        self.backward(ids, factor)
        if self.clips:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            self.model.clip_grad_norm_(0.1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def parameters(self) -> list[float]:
        self.model.finish()
        every = *self.head.parameters(), self.table.whole(self.table.weight)
        return [float(x) for p in every for x in p.flatten()]

    def close(self) -> None:
        self.model.close()
        self.table.close()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(WORDS, (64,), generator=generator) for _ in range(STEPS)]


def beside(rank: int, exchange: Any, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The parameters after some steps, without and with a scaler whose scale grows."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)):
        loop = Loop(exchange, scaler, **options)
        for ids in prefetch(batches(rank)):
            loop.step(ids)
        found.append(loop.parameters())
        loop.close()
    assert scaler is not None and scaler.get_scale() == 512 * 2 ** (STEPS // 3)
    return found[0], found[1]


TOPK, GTOPK = GTopK(0.2, mode="topk"), GTopK(0.2, mode="gtopk", conserve=True)


@pytest.mark.parametrize(
    ("exchange", "options", "size"),
    [("dense", {}, 2), ("dense", {"adam": True, "clips": True}, 3), (TOPK, {"clips": True}, 2),
     (GTOPK, {"adam": True}, 3), (GTOPK, {"accumulates": True}, 2), (GTopK(1.0), {}, 2)],
)  # fmt: skip
def test_a_scale_changes_no_bit(exchange: Any, options: dict[str, Any], size: int) -> None:
    rows = collectives.spawn(beside, size, args=(exchange, options), timeout=100)
    for without, scaled in rows:
        assert without == scaled == rows[0][0]


def overflowing(
    rank: int, exchange: Any, where: str, clips: bool = False
) -> tuple[float, list[float], list[float]]:
    """(the scale at the end, parameters before and after the step that is skipped)."""
    loop = Loop(exchange, torch.amp.GradScaler("cpu", init_scale=512.0), clips=clips)
    for step, ids in enumerate(prefetch(batches(rank))):
        before = loop.parameters() if step == OVERFLOW else []
        mine = rank == 1 and step == OVERFLOW
        if mine and where == "rows":  # only gradients of rows are not finite
            handle = loop.table.register_forward_hook(lambda _, ids, x: Spoilt.apply(x))
        loop.step(ids, float("inf") if mine and where == "loss" else 1.0)
        if mine and where == "rows":
            handle.remove()
        if step == OVERFLOW:
            skipped = before, loop.parameters()
    scale = loop.scaler.get_scale()
    assert all(torch.isfinite(torch.tensor(loop.parameters())))
    loop.close()
    return scale, *skipped


class Spoilt(torch.autograd.Function):
    """Whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.full_like(g, torch.inf)


@pytest.mark.parametrize("exchange", ["dense", TOPK, GTOPK, GTopK(1.0)])
def test_all_ranks_skip_a_step(exchange: Any) -> None:
    rows = collectives.spawn(overflowing, 3, args=(exchange, "loss"), timeout=100)
    for scale, before, after in rows:
        assert scale == 256 and before == after == rows[0][1]


@pytest.mark.parametrize("clips", [False, True])
def test_rows_alone_that_are_not_finite_are_seen_on_all_ranks(clips: bool) -> None:
    """As on one rank, the other optimizer steps, with clipping by nothing but its momentum."""
    rows = collectives.spawn(overflowing, 3, args=("dense", "rows", clips), timeout=100)
    for scale, before, after in rows:
        assert scale == 256
        assert before[-WORDS * 8 :] == after[-WORDS * 8 :] and before != after


@pytest.mark.parametrize("own", [False, True])
@on_ranks(2, timeout=100)
def test_a_loop_goes_on_after_a_skipped_step(rank: int, own: bool) -> None:
    """A loop that drops gradients in its own way."""
    loop = Loop("dense", torch.amp.GradScaler("cpu", init_scale=512.0))
    for optimizer in loop.optimizers if own else ():
        optimizer.zero_grad = lambda optimizer=optimizer: [
            setattr(p, "grad", None) for group in optimizer.param_groups for p in group["params"]
        ]
    for step, ids in enumerate(prefetch(batches(rank))):
        loop.step(ids, float("inf") if rank == 1 and step == OVERFLOW else 1.0)
    loop.parameters()
    scale: float = loop.scaler.get_scale()
    loop.close()
    assert scale == 256.0


def hooked(rank: int, scaled: bool) -> list[float]:
    model = Plain()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, enabled=scaled)
    state = GTopKState(density=0.02, mode="gtopk", scaler=scaler)
    ddp.register_comm_hook(state, gtopk_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(ddp(noise(rank, step))).backward()
        scaler.step(optimizer)
        scaler.update()
    residual = state.state_dict(model)["residual"]
    every = *model.parameters(), *(residual[name] for name in sorted(residual))
    return [float(x) for p in every for x in p.flatten()]


def hooks_part(rank: int) -> str:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if rank == 0 else None
    return refused(lambda: GTopKState(density=0.02, scaler=scaler))


def test_hooks_of_other_scalers_are_refused() -> None:
    assert all("different exchanges" in said for said in run(2, hooks_part, backend="gloo"))


def test_float16_is_refused_with_a_scale() -> None:
    scaler: Any = scaler_of()
    scaler.scale(torch.ones(()))
    average = SparseAverage(FakeTransport(0, 2), GTopK(0.5), LossScale(scaler))  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match="float32 and bfloat16"):
        average(0, torch.zeros(4, dtype=torch.float16), torch.zeros(4), [4], 0)


def test_a_hook_of_ddp_keeps_residuals_without_the_scale() -> None:
    scaled = run(2, hooked, True, backend="gloo")
    assert scaled == run(2, hooked, False, backend="gloo")


# ---- faults --------------------------------------------------------------------------------------
def scaler_of() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=512.0)


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except CollectiveError as error:
        return str(error)
    return ""


def faults(rank: int) -> dict[str, str]:
    said = {}
    ids = batches(rank)[0]

    loop = Loop(GTOPK, scaler_of())
    loop.backward(ids)
    said["a step without it"] = refused(loop.optimizers[0].step)
    said["rows' step without it"] = refused(loop.optimizers[1].step)
    second = nn.Linear(2, 2)
    loop.optimizers[0].add_param_group({"params": [*second.parameters()]})
    said["an optimizer of two"] = refused(
        lambda: DataParallel(second, loop.optimizers[0], scaler=scaler_of())
    )

    loop = Loop(GTOPK, scaler_of())
    loss = functional.cross_entropy(loop.model(ids), ids)
    said["a loss that is not scaled"] = refused(loss.backward)
    return said


def more_faults(rank: int) -> dict[str, str]:
    said = {}
    ids = batches(rank)[0]
    loop = Loop("dense", scaler_of())
    fused = torch.optim.SGD(loop.table.parameters(), 0.1, fused=True)
    loop.model.close()
    loop.model = DataParallel(
        nn.ModuleList([loop.table, loop.head]), [loop.optimizers[0], fused], scaler=loop.scaler
    )
    loss = functional.cross_entropy(loop.head(loop.table(ids)), ids)
    loop.scaler.scale(loss).backward()
    said["fused"] = refused(lambda: loop.scaler.step(fused))
    loop.scaler.update()
    loss = functional.cross_entropy(loop.head(loop.table(ids)), ids)
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(fused)
    said["fused and unscaled"] = refused(lambda: loop.scaler.step(fused))
    loop.close()

    narrow = Words(2)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (narrow.head, narrow.table)]
    said["columns"] = refused(lambda: DataParallel(narrow, optimizers, scaler=scaler_of()))
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    said["kind"] = refused(lambda: DataParallel(plain, optimizer, scaler=8.0))  # type: ignore[arg-type]
    other: Any = torch.amp.GradScaler("cpu", init_scale=8.0 + rank)
    said["ranks differ"] = refused(lambda: DataParallel(plain, optimizer, scaler=other))
    return said


def test_faults() -> None:
    for said in collectives.spawn(faults, 3, timeout=100):
        assert "call scaler.step(optimizer)" in said["a step without it"]
        assert "call scaler.step(optimizer)" in said["rows' step without it"]
        assert "has another scaler=" in said["an optimizer of two"]
        assert "has scaled no loss" in said["a loss that is not scaled"]
    for said in collectives.spawn(more_faults, 3, timeout=100):
        assert (
            "leave fused out" in said["fused"] and "leave fused out" in said["fused and unscaled"]
        )
        assert "2 columns for 3 ranks" in said["columns"]
        assert "must be a torch.amp.GradScaler or None, not 8.0" in said["kind"]
        assert "different exchanges or options" in said["ranks differ"]
