"""What a rank computes for an embedding whose columns are divided among ranks.

It is the scheme of Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training
of Deep Neural Networks" (2022), section 4.1: each rank has some columns of all rows. It looks up
the rows of all ranks (`lookup`), an all-to-all exchanges them, and `join_columns` puts whole rows
together; gradients take the way back (`split_columns`), and optimizers update the rows named, in
one pass. With vertical sparse scheduling (section 4.3), an update comes in two parts, prior rows
and delayed rows, which share one step (section 5.7): rows do not depend on one another, so that two
parts that have no row in common return the same bits as one.

Each value below is rounded to the dtype, except that `fma(x, y, z)` = x y + z is rounded once.
Scalars are computed in float64 and rounded once. The order is that of torch 2.13's SGD, Adagrad and
SparseAdam for sparse gradients. With g a gradient, and p its parameter:

    sgd_rows      p = fma(g, -lr, p)
    adagrad_rows  s = s + g g
                  p = fma(g / (sqrt(s) + eps), -lr, p)
    adam_rows     m = m + (g - m) (1 - beta1)
                  v = v + (g g - v) (1 - beta2)
                  p = p + m / (sqrt(v) + eps) (-lr sqrt(1 - beta2^step) / (1 - beta1^step))

In float32 and float64, SGD's p, Adagrad's s, and Adam's m and v have the same bits as torch's on
x86 processors, whose MKL fuses `axpy`. The p of Adagrad and Adam have them too if torch rounds
square roots to nearest; those of MKL, which torch's wheels call, are off by up to 1 ulp, depending
on the processor. CPUs and GPUs return the same bits, for any number of threads. For a NaN, all this
is true of its position, not of its payload.

Memory is written directly, so that autograd does not notice. On a GPU, work is enqueued on the
current CUDA stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from linkweave.kernels.embedding import cpu
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.optim.steps import SCALARS
from linkweave.kernels.tensors import check_overlaps, check_tensor, device_of
from linkweave.kernels.validate import at_least_0, floats_at_least_0, outside

INDICES = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
COPIED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@ranged
def sgd_rows(
    table: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, *, lr: float
) -> None:
    """One step of `torch.optim.SGD`, without momentum, for the rows that a sparse gradient has.

    `table` is [rows, width], `indices` is int32 or int64 [n], ascending and distinct, and
    `gradient` is [n, width]. All are contiguous, on the CPU or one GPU; the floats have one dtype:
    float32 or float64, which torch's operations update on a GPU. No two overlap.

    On the CPU, indices are checked before anything is written. On a GPU, where the host would wait
    for that, rows out of range are left out, and of a row that is named twice the result is
    undefined.

    ValueError, TypeError: an argument is out of range, or the tensors do not fit one another.
    """
    (lr,) = floats_at_least_0(lr=lr)
    _update("sgd", indices, gradient, (-lr,), table=table)


@ranged
def adagrad_rows(
    table: torch.Tensor, state_sum: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, *,
    lr: float, eps: float = 1e-10,
) -> None:  # fmt: skip
    """One step of `torch.optim.Adagrad` for the rows that a sparse gradient has.

    `lr` includes its decay: it is lr / (1 + (step - 1) lr_decay). `state_sum` has the table's shape
    and dtype: the sums of squares. Everything else is as in `sgd_rows`.
    """
    lr, eps = floats_at_least_0(lr=lr, eps=eps)
    _update("adagrad", indices, gradient, (eps, -lr), table=table, state_sum=state_sum)


@ranged
def adam_rows(
    table: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, indices: torch.Tensor,
    gradient: torch.Tensor, *, step: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:  # fmt: skip
    """One step of `torch.optim.SparseAdam`: rows that the gradient lacks keep their states.

    `step` counts from 1; parts of one step share it. The states have the table's shape and dtype.
    Everything else is as in `sgd_rows`.
    """
    lr, beta1, beta2, eps = floats_at_least_0(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps)
    if not max(beta1, beta2) < 1:
        raise ValueError(f"betas must be less than 1, not {betas}")
    if (step := at_least_0(step, "step")) == 0:
        raise ValueError("step counts from 1, not 0")
    rate = -lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    _update(
        "adam", indices, gradient, (1 - beta1, 1 - beta2, eps, rate), table=table, exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )  # fmt: skip


@ranged
def unique(ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(distinct rows, where each id is among them, how many they are) of tokens.

    `ids` is int64 [n], on the CPU or a GPU; those on the CPU are from 0 to num_rows - 1. Returns
    int64 [n], [n] and [1] there: the rows ascend, and `num_rows` follows the last one, so that on a
    GPU the host need not wait.

    ValueError, TypeError: `ids` is another tensor.
    """
    _check(ids, "ids", (torch.int64,), ids, (None,))
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = _kernels(ids.device).unique(ids.detach(), at_least_0(num_rows, "num_rows"))
    return found


@ranged
def sum_rows(
    rows: torch.Tensor, lengths: Sequence[int], values: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the rows that several ranks have: (distinct rows, their sums).

    `rows` is int64 [n], one list after another of so many distinct rows; `values` is [n, width] of
    float32 or float64. Values of one row are added in the order of the lists. On the
    CPU there are as many results as distinct rows; on a GPU, where the host would wait for their
    number, there are n, of which the last are the row `num_rows` and zeros.

    ValueError, TypeError: the tensors do not fit one another.
    """
    _check(values, "values", FLOATS, values)
    _check(rows, "rows", (torch.int64,), values, (len(values),))
    if (found := sum(at_least_0(n, "a length") for n in lengths)) != len(rows):
        raise ValueError(f"lengths add up to {found}, not to the {len(rows)} rows")
    total: tuple[torch.Tensor, torch.Tensor]
    total = _kernels(values.device).sum_rows(rows, list(lengths), values.detach(), num_rows)
    return total


@ranged
def lookup(
    table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, *, check: bool = True
) -> None:
    """out[i] = table[indices[i]]: rows of one rank's columns, to be sent.

    `table` is [rows, width], `indices` is int32 or int64 [n], in any order and with repeats, `out`
    is [n, width]. All are contiguous, on the CPU or one GPU; the dtype is float32, float64, float16
    or bfloat16. `out` overlaps nothing. With `check`, for which the host waits on a GPU, indices
    are compared with the number of rows before; without it, they must be in range.

    ValueError: an index is out of range, in which case nothing is written, or the tensors do not
    fit one another. TypeError: a dtype or device is wrong.
    """
    _check(table, "table", COPIED, table)
    _check(indices, "indices", INDICES, table, (None,))
    _check(out, "out", (table.dtype,), table, (indices.numel(), table.shape[1]))
    check_overlaps({"table": table, "indices": indices, "out": out})
    kernels = _kernels(table.device)
    if check and (at := kernels.first_outside(indices, len(table))) >= 0:
        raise ValueError(outside(at, int(indices[at]), len(table)))
    kernels.lookup(table.detach(), indices, out.detach())


@ranged
def join_columns(parts: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
    """Join the columns of rows that came from several ranks, those of rank 0 first.

    `parts` [n sum(widths)] is a receive buffer: one after another, the blocks [n, widths[r]] of all
    ranks r, each contiguous. `out` is [n, sum(widths)]. Both are contiguous, on the CPU or one GPU,
    and do not overlap; the dtype is float32, float64, float16 or bfloat16. On a GPU, there is one
    launch for each rank.

    ValueError, TypeError: the tensors do not fit one another.
    """
    each = _checked_widths(widths, parts, "parts", out, "out")
    _kernels(out.device).join_columns(parts.detach(), each, out.detach())


@ranged
def split_columns(x: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
    """Divide columns into blocks, one after another for each rank: undo `join_columns`.

    `x` is [n, sum(widths)], such as the gradients of whole rows, and `out` [n sum(widths)] is a
    send buffer. Everything else is as in `join_columns`.
    """
    each = _checked_widths(widths, out, "out", x, "x")
    _kernels(x.device).split_columns(x.detach(), each, out.detach())


def _update(
    kernel: str, indices: Any, gradient: Any, scalars: tuple[float, ...], **tables: torch.Tensor
) -> None:
    """A step of an optimizer; the table comes first of `tables`."""
    table = tables["table"]
    device = device_of(table, "table")
    _check(table, "table", FLOATS, table)
    for name, state in tables.items():
        _check(state, name, (table.dtype,), table, tuple(table.shape))
    _check(indices, "indices", INDICES, table, (None,))
    _check(gradient, "gradient", (table.dtype,), table, (indices.numel(), table.shape[1]))
    check_overlaps({**tables, "gradient": gradient})
    rows = len(table)
    if device.type == "cpu" and (at := cpu.first_wrong(indices, rows)) >= 0:
        index = int(indices[at])
        if 0 <= index < rows:
            raise ValueError(
                f"indices[{at}] is {index} after {int(indices[at - 1])}; they must ascend"
            )
        raise ValueError(outside(at, index, rows))
    rounded = tuple(map(SCALARS[table.dtype], scalars))
    update = getattr(_kernels(device), kernel)
    update(indices, gradient.detach(), rounded, *(x.detach() for x in tables.values()))


def _checked_widths(
    widths: Sequence[int], blocks: torch.Tensor, name: str, columns: torch.Tensor, other: str
) -> list[int]:
    """The widths of the blocks, which must fit the columns of whole rows."""
    each = [at_least_0(width, f"widths[{r}]") for r, width in enumerate(widths)]
    _check(columns, other, COPIED, columns, (None, sum(each)))
    _check(blocks, name, (columns.dtype,), columns, (columns.numel(),))
    check_overlaps({name: blocks, other: columns})
    return each


def _kernels(device: torch.device) -> Any:
    if device.type == "cpu":
        return cpu
    from linkweave.kernels.embedding import gpu  # which imports Triton

    return gpu


def _check(
    x: Any, name: str, dtypes: Sequence[torch.dtype], first: Any,
    shape: tuple[int | None, ...] = (None, None),
) -> None:  # fmt: skip
    """`x` must be a contiguous tensor of one of the dtypes on the device of `first`.

    None in `shape` allows any number.
    """
    device_of(x, name)
    check_tensor(x, name, dtypes, first.device, shape)
