"""The Triton kernels of optimizers against the CPU's, bit for bit.

A script: TRITON_INTERPRET=1 chooses Triton's interpreter, which rounds an `fma` twice; here it is
rounded once, as on GPUs. Without it, kernels run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import float32, vectorize

from linkweave.kernels import optim
from linkweave.kernels.optim import cpu, steps
from tests.cpu.casting import INTERPRETED, device_for, same, special

SIZES = (0, 1, 7, 1023, 1024, 1025, 2048, 3001)
GAP = 4  # elements between tensors, at least; keeps alignment
SGD = (
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
)
ADAM = (
    {"step": 1, "lr": 0.01},
    {"step": 3, "lr": 0.01, "weight_decay": 0.1, "maximize": True},
    {"step": 3, "lr": 0.01, "weight_decay": 0.1, "decoupled": True, "betas": (0.4, 0.9)},
)


@vectorize([float32(float32, float32, float32)])
def fma(x: Any, y: Any, z: Any) -> Any:
    return cpu.fma(x, y, z)


def round_fma_once() -> None:
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def column(seed: int, shift: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer, and tensors in it that begin `shift` elements past multiples of 16 bytes."""
    starts = [GAP + shift]
    for n in SIZES:
        starts.append(starts[-1] + (n + 3) // 4 * 4 + GAP)
    flat = special(starts[-1], seed)
    flat[flat.isnan()] = 0.5
    assert flat.data_ptr() % 16 == 0
    return flat, [flat[start : start + n] for start, n in zip(starts, SIZES, strict=False)]


def updated(step: Any, shift: int, finite: bool, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """All memory of parameters, gradients and states after a step."""
    flats, columns = zip(*(column(i, shift if i == 1 else 0) for i in range(4)), strict=True)
    flats[3].abs_()
    if finite:
        for flat in flats:
            flat.nan_to_num_(posinf=2.0, neginf=-3.0).clamp_(-1e9, 1e9)
    table = optim.Table(*columns)
    if INTERPRETED and steps._kernels(table) is not cpu:
        table.rows = torch.from_numpy(table.rows)
    step(table, **arguments)
    return [flat.nan_to_num_(nan=0.75) for flat in flats]


def main() -> None:
    from linkweave.kernels.optim import gpu

    round_fma_once()
    for step, cases in ((optim.sgd, SGD), (optim.adam, ADAM)):
        for arguments in cases:
            for shift, finite in ((0, True), (1, False)):
                found = []
                for kernels in (cpu, gpu):
                    steps._kernels = lambda table, kernels=kernels: kernels
                    device_for(kernels)
                    found.append(updated(step, shift, finite, arguments))
                assert all(map(same, *found)), (arguments, shift)
    print("same bits")


if __name__ == "__main__":
    main()
