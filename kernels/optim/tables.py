"""The table of tensors that an update reads: a row of addresses for each block of elements."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

from linkweave.kernels.tensors import check_overlaps

BLOCK = 1024  # elements; a power of two
PARAM, GRAD, STATE, STATE_2, COUNT = range(5)  # columns: four addresses, and a number of elements
COLUMNS = 5

DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}


class Table:
    """Parameters, gradients and optimizer states of a layer, by their addresses.

    `params`, `grads` and each of `states` are lists of as many tensors: for SGD, momentum buffers
    (none without momentum); for Adam, `exp_avg` and `exp_avg_sq`. All tensors are on one device,
    and of one dtype: float32, or on the CPU float64. Those at the same position have the same shape
    and strides, which leave no gaps (contiguous, channels last, transposed, ...), so that they are
    updated in the order of memory. No two tensors overlap. Otherwise TypeError or ValueError is
    raised.

    Build it once: it takes longer than an update. It keeps the tensors alive, unless
    `without_tensors`; if gradients are others of the same kind, `move` tells where they are, and if
    a parameter's `data` is replaced, a new table is needed. Updates write memory directly, so that
    autograd does not notice a parameter that changes between forward and backward.

    `rows` is int64 [blocks, 5] on the device: NumPy's on the CPU, torch's on a GPU. On a GPU, a
    tensor that does not begin at a multiple of 16 bytes is accessed element by element; align the
    gradients in their buffer.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        *states: Sequence[torch.Tensor],
    ) -> None:
        if not params or len(states) > 2:
            raise ValueError(
                f"a table of {len(params)} parameters with {len(states)} states each; there must "
                "be at least 1 and at most 2"
            )
        names = ("params", "grads", "states[0]", "states[1]")
        columns = dict(zip(names, (params, grads, *states), strict=False))
        self.device, self.dtype = params[0].device, params[0].dtype
        if self.dtype not in DTYPES.get(self.device.type, ()):
            raise TypeError(
                f"parameters of {self.dtype} on {self.device} are not supported; choose "
                "float32, or float64 on the CPU"
            )
        check_columns(columns)
        self.states = len(states)
        self.tensors = tuple(tuple(column) for column in columns.values())
        rows = np.concatenate([_rows(group) for group in zip(*self.tensors, strict=True)])
        self.blocks = len(rows)
        self.addresses = [grad.data_ptr() for grad in grads]
        """Where the gradients are."""
        self._host = rows
        counts = [-(-grad.numel() // BLOCK) for grad in grads]
        self._of = np.repeat(np.arange(len(grads)), counts)  # the gradient of each block
        self._ends = rows[:, GRAD] + rows[:, COUNT] * params[0].element_size()
        self.rows: Any = rows
        if self.device.type != "cpu":
            self.rows = torch.from_numpy(rows).to(self.device)

    def without_tensors(self) -> Table:
        """This table, which keeps no tensor alive any more; its user knows that they are there."""
        self.tensors = ()
        return self

    def move(self, addresses: Sequence[int]) -> None:
        """The gradients are at these addresses now, of the same strides as before."""
        by = np.subtract(addresses, self.addresses)[self._of]
        self._host[:, GRAD] += by
        self._ends += by
        self.addresses = [*addresses]
        if self.device.type != "cpu":
            self.rows = torch.from_numpy(self._host).to(self.device)

    def part(self, start: int, stop: int) -> Table:
        """The table of the blocks [start, stop); it shares all memory with this one."""
        made = copy(self)
        made.rows, made._ends = self.rows[start:stop], self._ends[start:stop]
        made.blocks = len(made.rows)
        return made

    def blocks_before(self, address: int) -> int:
        """How many blocks, from the first, have gradients that end at an address or before it."""
        after = self._ends > address
        return int(after.argmax()) if after.any() else self.blocks


def check_columns(columns: dict[str, Sequence[torch.Tensor]]) -> None:
    """Tensors must fit those of the same position in `params`, and must not overlap."""
    params = columns["params"]
    named = {}
    for name, column in columns.items():
        if len(column) != len(params):
            raise ValueError(f"{len(params)} params, but {len(column)} {name}")
        for i, (tensor, param) in enumerate(zip(column, params, strict=True)):
            here = f"{name}[{i}]"
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                kind = getattr(tensor, "layout", type(tensor).__name__)
                raise TypeError(f"{here} must be a dense tensor, not {kind}")
            if (tensor.device, tensor.dtype) != (params[0].device, params[0].dtype):
                raise TypeError(
                    f"{here} is {tensor.dtype} on {tensor.device}, params[0] {params[0].dtype} on "
                    f"{params[0].device}: they must agree"
                )
            if tensor.shape != param.shape or _strides(tensor) != _strides(param):
                raise ValueError(
                    f"{here} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
                    f"params[{i}] {tuple(param.shape)} and {param.stride()}: they must agree"
                )
            if not _is_dense(tensor):
                raise ValueError(f"{here} has gaps or overlaps: its strides are {tensor.stride()}")
            named[here] = tensor
    check_overlaps(named)


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, each its own."""
    end = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride != end:
                return False
            end *= n
    return True


def _rows(group: Sequence[torch.Tensor]) -> np.ndarray:
    """The rows of one parameter. Addresses of states that it does not have are 0."""
    starts = np.arange(0, group[0].numel(), BLOCK)
    rows = np.zeros((len(starts), COLUMNS), np.int64)
    for column, tensor in enumerate(group):
        rows[:, column] = tensor.data_ptr() + starts * tensor.element_size()
    rows[:, COUNT] = np.minimum(group[0].numel() - starts, BLOCK)
    return rows
