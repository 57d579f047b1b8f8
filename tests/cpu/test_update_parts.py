"""Updates of a unit while its gradients arrive, beside torch's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from linkweave.collectives.training.update import Update
from linkweave.kernels.optim import Table
from linkweave.kernels.optim.tables import BLOCK

SHAPES = (3 * BLOCK + 5,), (40, 50), (1,), (2 * BLOCK,)
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.1),
    lambda p: torch.optim.NAdam(p, 0.1),  # by its own step
    lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.2}], 0.1, momentum=0.5),
]


class Model:
    """Parameters whose gradients lie one after another in memory."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.randn(shape).requires_grad_() for shape in SHAPES]
        self.optimizer = make(self.parameters)
        self.whole = torch.zeros(sum(p.numel() for p in self.parameters))
        for p, part in zip(
            self.parameters, self.whole.split([p.numel() for p in self.parameters]), strict=True
        ):
            p.grad = part.view(p.shape)

    def bits(self) -> torch.Tensor:
        states = [
            state[name].float().flatten()
            for state in self.optimizer.state.values() for name in sorted(state)
            if state[name] is not None
        ]  # fmt: skip
        return torch.cat([*(p.detach().flatten() for p in self.parameters), *states])


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("ends", [[], [1], [BLOCK], [7, 2 * BLOCK + 3, 5000], [10_000_000]])
def test_gradients_that_arrive_late_are_used(
    make: Callable[[Any], torch.optim.Optimizer], ends: list[int]
) -> None:
    """Gradients are NaN until they arrive, so a step that reads them too early shows."""
    late, usual = Model(make), Model(make)
    update = Update(late.optimizer)
    for step in range(3):
        gradients = torch.randn(len(usual.whole))
        usual.whole.copy_(gradients)
        usual.optimizer.step()
        late.whole.fill_(float("nan"))

        def arriving(gradients: torch.Tensor = gradients) -> Iterator[int]:
            for end in [*ends, len(gradients)]:
                late.whole[:end] = gradients[:end]
                yield late.whole.data_ptr() + 4 * min(end, len(gradients))

        update.snapshot()
        update.part(late.parameters, arriving())
        torch.testing.assert_close(late.bits(), usual.bits(), rtol=1e-6, atol=1e-7, msg=f"{step}")


def test_what_has_arrived_is_updated_before_the_rest_is_awaited() -> None:
    model = Model(OPTIMIZERS[1])
    update, first = Update(model.optimizer), model.parameters[0]
    before = first.detach().clone()
    seen = []

    def arriving() -> Iterator[int]:
        for end in (BLOCK - 1, BLOCK, 2 * BLOCK + 1):
            yield model.whole.data_ptr() + 4 * end
            seen.append(int((first != before).sum()))

    model.whole.fill_(1.0)
    update.snapshot()
    update.part(model.parameters, arriving())
    assert seen == [0, BLOCK, 2 * BLOCK]
    assert (first != before).all()


def test_parts_of_a_table() -> None:
    whole = torch.zeros(4 * BLOCK + 7)
    table = Table(
        [torch.zeros(BLOCK + 1), torch.zeros(3 * BLOCK)], [whole[: BLOCK + 1], whole[BLOCK + 7 :]]
    )
    ends = [BLOCK, BLOCK + 1, 2 * BLOCK + 7, 3 * BLOCK + 7, 4 * BLOCK + 7]
    assert table.blocks == len(ends)
    for end in range(4 * BLOCK + 8):
        expected = sum(e <= end for e in ends)
        assert table.blocks_before(whole.data_ptr() + 4 * end) == expected
    part = table.part(1, 4)
    assert part.blocks == 3 and (part.rows == table.rows[1:4]).all()
    assert part.blocks_before(whole.data_ptr() + 4 * ends[2]) == 2
    assert table.part(5, 5).blocks == 0 and table.blocks == 5


class OnGpu:
    """The number of steps where a checkpoint of a GPU has it: to read it there waits."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        return torch.tensor(7.0)


def test_a_number_of_steps_on_the_gpu_is_moved_once() -> None:
    model = Model(OPTIMIZERS[2])
    update = Update(model.optimizer)
    for _ in range(2):
        update.snapshot()
        update.part(model.parameters)
        states: Any = model.optimizer.state
        for parameter in model.parameters:
            if states[parameter]["step"] == 1:
                states[parameter]["step"] = OnGpu()
    assert {float(states[p]["step"]) for p in model.parameters} == {8.0}
