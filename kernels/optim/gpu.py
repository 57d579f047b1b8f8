"""Updates of parameters by SGD and Adam on a GPU in Triton: one launch for all tensors of a table.

Bytes: each element is read and written once: 12 bytes for SGD, 20 with momentum, 28 for Adam.
Program i updates the block that row i of the table names, up to BLOCK elements of one tensor; of a
row, 40 bytes, it reads five numbers at the same addresses in all threads. Programs share nothing,
so no memory order is needed beyond that of the CUDA stream, and results do not depend on the grid.

Bounds: addresses are int64, and offsets within a block are less than BLOCK. The offset of a row is
int32, enough for 2^31 / 5 rows, that is 4 * 10^11 elements. Blocks that end a tensor may have fewer
than BLOCK elements and have a mask.

Alignment: the compiler cannot know that of addresses from memory. Programs look: if the block is
whole and its arrays begin at multiples of 16 bytes, they access 16 bytes per thread, as 8 warps
have 4 elements per thread. Otherwise they access element by element under a mask, and exchange data
through shared memory to store it.

Occupancy: Adam needs at most 48 registers, so that 1,280 threads fit a multiprocessor and read 16
bytes of four arrays each, 80 KiB; read bandwidth times latency of an H100 is 4/7 of 25 bytes per
ns, times 800 ns, 11 KB.

Rounding: additions, products, divisions and square roots are rounded to nearest, and are fused only
where `kernels.optim.steps` says so, for the same bits as on CPUs; Triton would fuse others, and
approximate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from linkweave.kernels.optim.tables import BLOCK, COLUMNS, Table

WARPS = 8
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _load(address, at, n, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(tl.multiple_of(address + at, 16))
    return tl.load(address + at, mask=at < n, other=0)


@triton.jit
def _store(address, at, n, value, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(tl.multiple_of(address + at, 16), value)
    else:
        tl.store(address + at, value, mask=at < n)


@triton.jit
def _decayed(g, p, sign, decay, DECAY: tl.constexpr):
    y = g * sign
    if DECAY:
        y = tl.fma(p, decay, y)
    return y


@triton.jit
def _sgd(
    param, grad, state, n, sign, decay, momentum, rest, rate, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    g = _load(grad, at, n, WHOLE)
    p = _load(param, at, n, WHOLE)
    y = _decayed(g, p, sign, decay, DECAY)
    if MOMENTUM:
        b = tl.fma(y, rest, _load(state, at, n, WHOLE) * momentum)
        _store(state, at, n, b, WHOLE)
        y = tl.fma(b, momentum, y) if NESTEROV else b
    _store(param, at, n, tl.fma(y, rate, p), WHOLE)


@triton.jit
def _adam(
    param, grad, state, state_2, n, sign, shrink, decay, weight, beta2, rest, root, eps,
    rate, NEAR: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    g = _load(grad, at, n, WHOLE)
    p = _load(param, at, n, WHOLE) * shrink
    mean = _load(state, at, n, WHOLE)
    square = _load(state_2, at, n, WHOLE)
    y = _decayed(g, p, sign, decay, DECAY)
    m = tl.fma(y - mean, weight, mean if NEAR else y)
    v = tl.fma(y * rest, y, square * beta2)
    _store(state, at, n, m, WHOLE)
    _store(state_2, at, n, v, WHOLE)
    p += tl.div_rn(m * rate, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    _store(param, at, n, p, WHOLE)


@triton.jit
def _read_row(rows, BLOCK: tl.constexpr):
    """The program's row, addresses as pointers, and whether its block is whole and aligned."""
    row = rows + tl.program_id(0) * _COLUMNS
    p, g, a, b = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    n = tl.load(row + 4)
    whole = (n == BLOCK) & ((p | g | a | b) % 16 == 0)
    kind: tl.constexpr = tl.pointer_type(tl.float32)
    return p.to(kind), g.to(kind), a.to(kind), b.to(kind), n, whole


@triton.jit
def sgd_kernel(
    rows, sign, decay, momentum, rest, rate, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p, g, a, _, n, whole = _read_row(rows, BLOCK)
    if whole:
        _sgd(p, g, a, n, sign, decay, momentum, rest, rate, MOMENTUM, NESTEROV, DECAY, BLOCK, True)
    else:
        _sgd(p, g, a, n, sign, decay, momentum, rest, rate, MOMENTUM, NESTEROV, DECAY, BLOCK, False)


@triton.jit
def adam_kernel(
    rows, sign, shrink, decay, weight, beta2, rest, root, eps, rate, NEAR: tl.constexpr,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p, g, a, b, n, whole = _read_row(rows, BLOCK)
    if whole:
        _adam(p, g, a, b, n, sign, shrink, decay, weight, beta2, rest, root, eps, rate,
              NEAR, DECAY, BLOCK, True)  # fmt: skip
    else:
        _adam(p, g, a, b, n, sign, shrink, decay, weight, beta2, rest, root, eps, rate,
              NEAR, DECAY, BLOCK, False)  # fmt: skip


def sgd(table: Table, scalars: Any, nesterov: bool) -> None:
    """Enqueue a step of SGD; `scalars` are those of `sgd_kernel`."""
    _, decay, momentum, _, _ = scalars
    _launch(sgd_kernel, table, scalars, MOMENTUM=bool(momentum), NESTEROV=nesterov,
            DECAY=bool(decay))  # fmt: skip


def adam(table: Table, scalars: Any, near: bool) -> None:
    """Enqueue a step of Adam; `scalars` are those of `adam_kernel`."""
    _, _, decay, *_ = scalars
    _launch(adam_kernel, table, scalars, NEAR=near, DECAY=bool(decay))


def _launch(kernel: Any, table: Table, scalars: Any, **flags: bool) -> None:
    """On the current CUDA stream; does not wait."""
    if not table.blocks:
        return
    with torch.cuda.device_of(table.rows):
        kernel[(table.blocks,)](
            table.rows, *map(float, scalars), **flags, BLOCK=BLOCK, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
