"""Rows and columns of embeddings on a GPU in Triton.

Bytes: each element is read and written once: 12 bytes for SGD, 20 for Adagrad, 28 for Adam, 8 for
copies of float32. A program works on a tile of 1,024 elements: 8 rows of 128 columns, or more rows
of as many columns as a power of two. The last tile of a row masks columns that do not exist; a
width just above a power of two wastes up to half of the threads, but no access. Each row has 4 or 8
bytes of index, which all its threads read at one address.

Memory order: programs share nothing, as indices are distinct where rows are updated, so no order is
needed beyond that of the CUDA stream, and results do not depend on the grid.

Bounds: numbers of rows, and so offsets, are int64. Indices are compared with the number of rows
before memory is accessed; the others have a mask. There are at most 2^31 - 1 programs, as many as a
grid can have: 2^41 elements, if rows are 128 wide.

Alignment: widths are constants of the compiler, so that it knows which elements of a row are
aligned. If arrays begin at multiples of 16 bytes and widths are multiples of 4, 8 warps access 16
bytes per thread, and a warp a row of 128 floats; otherwise, element by element. A model has few
widths, for each of which a kernel is compiled.

Occupancy: with aligned rows, at most 32 registers, so that 2,048 threads fit a multiprocessor.
Those of Adam read 16 bytes of four arrays each, 128 KiB; read bandwidth times latency of an H100 is
4/7 of 25 bytes per ns, times 800 ns, 11 KB, and twice that as indices come first, with a latency of
their own. Element by element, Adam needs at most 48 registers, for 1,280 threads.

Rounding: as `kernels.embedding.steps` says; Triton would fuse others, and approximate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from linkweave.kernels.embedding.cpu import PATTERNS

BLOCK, WARPS = 1024, 8
MOST_COLUMNS = 128


@triton.jit
def _tile(indices, n, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows that indices name, positions of the indices, columns, which of them exist) of the
    program's tile; without indices, these are their positions."""
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    j = (program // ACROSS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = program % ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    i = j
    if indices is not None:
        i = tl.load(indices + j, mask=j < n, other=-1).to(tl.int64)
    return i, j, c, (j < n) & (i >= 0) & (i < rows) & (c < WIDTH)


@triton.jit(do_not_specialize=["n", "rows", "rate"])
def sgd_kernel(
    indices, gradient, table, n, rows, rate, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    i, j, c, inside = _tile(indices, n, rows, WIDTH, ROWS, COLUMNS)
    g = tl.load(gradient + (j * WIDTH + c), mask=inside, other=0)
    at = table + (i * WIDTH + c)
    tl.store(at, tl.fma(g, rate, tl.load(at, mask=inside, other=0)), mask=inside)


@triton.jit(do_not_specialize=["n", "rows", "eps", "rate"])
def adagrad_kernel(
    indices, gradient, table, state_sum, n, rows, eps, rate, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i, j, c, inside = _tile(indices, n, rows, WIDTH, ROWS, COLUMNS)
    at = i * WIDTH + c
    g = tl.load(gradient + (j * WIDTH + c), mask=inside, other=0)
    p = tl.load(table + at, mask=inside, other=0)
    s = tl.load(state_sum + at, mask=inside, other=0) + g * g
    tl.store(state_sum + at, s, mask=inside)
    tl.store(table + at, tl.fma(tl.div_rn(g, tl.sqrt_rn(s) + eps), rate, p), mask=inside)


@triton.jit(do_not_specialize=["n", "rows", "rest", "rest_2", "eps", "rate"])
def adam_kernel(
    indices, gradient, table, exp_avg, exp_avg_sq, n, rows, rest, rest_2, eps, rate,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i, j, c, inside = _tile(indices, n, rows, WIDTH, ROWS, COLUMNS)
    at = i * WIDTH + c
    g = tl.load(gradient + (j * WIDTH + c), mask=inside, other=0)
    p = tl.load(table + at, mask=inside, other=0)
    m = tl.load(exp_avg + at, mask=inside, other=0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0)
    m += (g - m) * rest
    v += (g * g - v) * rest_2
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(table + at, p + tl.div_rn(m, tl.sqrt_rn(v) + eps) * rate, mask=inside)


@triton.jit(do_not_specialize=["n", "rows"])
def copy_kernel(
    indices, x, out, n, rows, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[j] = x[indices[j]], or x[j] if the indices are None, of rows at these strides."""
    i, j, c, inside = _tile(indices, n, rows, WIDTH, ROWS, COLUMNS)
    value = tl.load(x + (i * X_STRIDE + c), mask=inside, other=0)
    tl.store(out + (j * OUT_STRIDE + c), value, mask=inside)


def unique(ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.embedding.unique`, by operations of torch."""
    keys, order = ids.sort(stable=True)
    first = torch.ones_like(keys)
    first[1:] = keys[1:] != keys[:-1]
    at = first.cumsum(0) - 1
    positions = torch.empty_like(ids).scatter_(0, order, at)
    rows = torch.full_like(ids, num_rows).scatter_(0, at, keys)  # equal ids write the same
    return rows, positions, first.sum().view(1)


def sum_rows(
    rows: torch.Tensor, lengths: list[int], values: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.embedding.sum_rows`, by operations of torch: no list adds to a row twice, so the
    order of additions is that of the lists."""
    found, positions, _ = unique(rows, num_rows)
    sums = torch.zeros_like(values)
    for at, part in zip(positions.split(lengths), values.split(lengths), strict=True):
        # not index_add_, whose atomic additions flush subnormals
        sums.index_copy_(0, at, sums[at] + part)
    return found, sums


def first_outside(indices: torch.Tensor, rows: int) -> int:
    """The first position whose index is out of range; -1 if there is none. The host waits."""
    found = (indices < 0) | (indices >= rows)
    return int(found.nonzero()[0]) if found.any() else -1


def sgd(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: Any) -> None:
    """Enqueue a step of SGD; `scalars` are (-lr,)."""
    _unnoticed("sgd", indices, gradient, scalars, tables)


def adagrad(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: Any) -> None:
    """Enqueue a step of Adagrad; `scalars` are those of `adagrad_kernel`."""
    _unnoticed("adagrad", indices, gradient, scalars, tables)


def adam(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: Any) -> None:
    """Enqueue a step of Adam; `scalars` are those of `adam_kernel`."""
    _unnoticed("adam", indices, gradient, scalars, tables)


def lookup(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Enqueue `kernels.embedding.lookup` of indices in range; does not wait."""
    _copy(indices, table, out)


def join_columns(blocks: torch.Tensor, widths: list[int], columns: torch.Tensor) -> None:
    """Enqueue `kernels.embedding.join_columns`; does not wait."""
    for block, part in _pieces(blocks, widths, columns):
        _copy(None, block, part)


def split_columns(columns: torch.Tensor, widths: list[int], blocks: torch.Tensor) -> None:
    """Enqueue `kernels.embedding.split_columns`; does not wait."""
    for block, part in _pieces(blocks, widths, columns):
        _copy(None, part, block)


def _pieces(blocks: torch.Tensor, widths: list[int], columns: torch.Tensor) -> Any:
    """(block, its columns) of each rank."""
    n = len(columns)
    each = blocks.split([n * width for width in widths])
    found = [block.view(n, width) for block, width in zip(each, widths, strict=True)]
    return zip(found, columns.split(widths, 1), strict=True)


def _unnoticed(
    kernel: str, indices: torch.Tensor, gradient: torch.Tensor, scalars: Any,
    tables: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Update tables as the CPU does, without a change of their versions."""
    with torch.autograd._unsafe_preserve_version_counter(tables):
        if gradient.dtype == torch.float64:
            _by_torch(kernel, indices, gradient, [*map(float, scalars)], tables)
        else:
            _update(kernel, indices, gradient, [*map(float, scalars)], list(tables))


def _by_torch(
    kernel: str, indices: torch.Tensor, gradient: torch.Tensor, scalars: Sequence[float],
    tables: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """A step in float64 by torch's operations: Triton takes a number as float32. Enqueues all."""
    if not gradient.numel():
        return
    fine = (indices >= 0) & (indices < len(tables[0]))
    at, g = torch.where(fine, indices, 0).long(), gradient
    p, *states = (table[at] for table in tables)
    if kernel == "sgd":
        made = [torch.add(p, g, alpha=scalars[0])]
    elif kernel == "adagrad":
        eps, rate = scalars
        s = torch.addcmul(states[0], g, g)
        made = [torch.addcdiv(p, g, s.sqrt() + eps, value=rate), s]
    else:
        rest, rest_2, eps, rate = scalars
        m, v = states[0] + (g - states[0]) * rest, states[1] + (g * g - states[1]) * rest_2
        made = [p + m / (v.sqrt() + eps) * rate, m, v]
    # rows out of range write what one of the others does; without others, the first as it is
    one = fine.to(torch.uint8).argmax(keepdim=True)
    to = torch.where(fine, at, at[one])
    for table, new, old in zip(tables, made, (p, *states), strict=True):
        new = torch.where(fine[:, None], new, old)
        table.index_copy_(0, to, torch.where(fine[:, None], new, new[one]))


KERNELS = {"sgd": sgd_kernel, "adagrad": adagrad_kernel, "adam": adam_kernel}


@torch.library.custom_op("linkweave::update_rows", mutates_args=("tables",))
def _update(
    kernel: str, indices: torch.Tensor, gradient: torch.Tensor, scalars: Sequence[float],
    tables: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    n, width = gradient.shape
    _launch(KERNELS[kernel], n, width, indices, gradient, *tables, n, len(tables[0]), *scalars)


@torch.library.custom_op("linkweave::copy_rows", mutates_args=("out",))
def _copy(indices: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor) -> None:
    n, width = out.shape
    patterns = PATTERNS[x.element_size()]
    _launch(copy_kernel, n, width, indices, x.view(patterns), out.view(patterns), n, len(x),
            X_STRIDE=x.stride(0), OUT_STRIDE=out.stride(0))  # fmt: skip


@_update.register_fake
@_copy.register_fake
def _(*_: Any) -> None:
    return None


def tile(width: int) -> dict[str, int]:
    """The constants of a kernel for rows of this width."""
    columns = min(triton.next_power_of_2(width), MOST_COLUMNS)
    return {"WIDTH": width, "ROWS": BLOCK // columns, "COLUMNS": columns}


def _launch(kernel: Any, n: int, width: int, *arguments: Any, **constants: int) -> None:
    """On the current CUDA stream of the second argument's device."""
    if n and width:
        constants |= tile(width)
        programs = triton.cdiv(n, constants["ROWS"]) * triton.cdiv(width, constants["COLUMNS"])
        with torch.cuda.device_of(arguments[1]):
            kernel[(programs,)](*arguments, **constants, num_warps=WARPS, enable_fp_fusion=False)
