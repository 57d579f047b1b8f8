"""The Triton kernels of embeddings against the CPU's, bit for bit.

A script: TRITON_INTERPRET=1 chooses Triton's interpreter; without it, kernels run on a GPU.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

from linkweave.kernels import embedding
from linkweave.kernels.embedding import cpu, steps
from tests.cpu.casting import device_for, same, special
from tests.cpu.interpreted_optim import round_fma_once

ROWS = 90
WIDTHS = (0, 1, 3, 17, 128, 300)
COUNTS = (0, 1, 20)
INDICES = (torch.int32, torch.int64)
WAYS: tuple[tuple[Any, int, dict[str, Any]], ...] = (
    (embedding.sgd_rows, 0, {"lr": 0.1}),
    (embedding.adagrad_rows, 1, {"lr": 0.1, "eps": 1e-10}),
    (embedding.adam_rows, 2, {"step": 3, "lr": 0.01, "betas": (0.8, 0.99)}),
)


def plain(x: torch.Tensor) -> torch.Tensor:
    """All NaN become one, as their payloads may differ."""
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


def memory(rows: int, width: int, seed: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer, and rows in it that begin `shift` elements past a multiple of 16 bytes."""
    flat = special(rows * width + 8, seed)
    return flat, flat[shift : shift + rows * width].view(rows, width)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in a dtype, converted by the CPU: GPUs keep other payloads of NaN."""
    return x.cpu().to(dtype).to(x.device)


def some_rows(n: int, kind: torch.dtype, ascending: bool) -> torch.Tensor:
    rng = np.random.default_rng(n)
    found = np.sort(rng.permutation(ROWS)[:n]) if ascending else rng.integers(0, ROWS, n)
    return torch.from_numpy(found).to(kind)


def updated(way: Any, n: int, width: int, kind: torch.dtype, shift: int) -> list[torch.Tensor]:
    step, states, arguments = way
    flats, tables = zip(*(memory(ROWS, width, i, shift) for i in range(1 + states)), strict=True)
    for state in tables[1:]:
        state.abs_()
    _, gradient = memory(n, width, 7, shift)
    step(*tables, some_rows(n, kind, True).to(gradient.device), gradient, **arguments)
    return [plain(flat) for flat in flats]


def looked_up(n: int, width: int, kind: torch.dtype, dtype: torch.dtype) -> list[torch.Tensor]:
    table = narrowed(memory(ROWS, width, 1, 0)[1], dtype)
    whole = torch.zeros(n * width + 8, dtype=dtype, device=table.device)
    out = whole[4:-4].view(n, width)
    embedding.lookup(table, some_rows(n, kind, False).to(table.device), out)
    return [whole]


def moved(n: int, widths: tuple[int, ...], dtype: torch.dtype, shift: int) -> list[torch.Tensor]:
    total = sum(widths)
    parts = narrowed(memory(1, n * total, 5, shift)[1].view(-1), dtype)
    joined = torch.zeros(n * total + 8, dtype=dtype, device=parts.device)
    columns = joined[shift : shift + n * total].view(n, total)
    embedding.join_columns(parts, widths, columns)
    split = torch.zeros_like(joined)
    embedding.split_columns(columns, widths, split[4:-4])
    assert same(split[4:-4], parts)
    return [joined, split]


def check(made: Any, *arguments: Any) -> None:
    from linkweave.kernels.embedding import gpu

    found = []
    for kernels in (cpu, gpu):
        steps._kernels = lambda device, kernels=kernels: kernels
        device_for(kernels)
        found.append(made(*arguments))
    assert all(map(same, *found)), arguments


def rows_out_of_range_are_left_out() -> None:
    from linkweave.kernels.embedding import gpu

    for kind in INDICES:
        indices = torch.tensor([-(2**31), -1, 0, 5, ROWS - 1, ROWS, 2**31 - 1]).to(kind)
        inside = (indices >= 0) & (indices < ROWS)
        found = []
        for kernels, chosen in ((cpu, inside), (gpu, torch.full_like(inside, True))):
            device = device_for(kernels)
            _, gradient = memory(7, 17, 7, 0)
            flat, table = memory(ROWS, 17, 0, 3)
            rows, chosen = indices.to(device)[chosen.to(device)], chosen.to(device)
            kernels.sgd(rows, gradient[chosen], (np.float32(-0.5),), table)
            found.append(plain(flat))
        assert same(*found)
        there = indices.to(device_for(gpu))
        assert gpu.first_outside(there, ROWS) == cpu.first_outside(indices, ROWS) == 0
        assert gpu.first_outside(there[2:], ROWS) == cpu.first_outside(indices[2:], ROWS) == 3
        assert gpu.first_outside(there[2:5], ROWS) == -1


def main() -> None:
    round_fma_once()
    for i, (n, width, way) in enumerate(product(COUNTS, WIDTHS, WAYS)):
        check(updated, way, n, width, INDICES[i % 2], i % 3)
    for i, (n, width) in enumerate(product(COUNTS, WIDTHS)):
        check(looked_up, n, width, INDICES[i % 2], steps.COPIED[i % 4])
    for n, widths in product(COUNTS, ((), (0,), (5,), (16, 16, 16), (0, 1, 17, 0, 130, 2))):
        check(moved, n, widths, torch.float32, n % 3)
    check(moved, 9, (4, 3), torch.float64, 1)
    check(moved, 9, (4, 3), torch.float16, 1)
    rows_out_of_range_are_left_out()
    print("same bits")


if __name__ == "__main__":
    main()
