"""Checks of sparse vectors and residuals of any library, on any device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.sparse.modes import MODES
from linkweave.collectives.tensors import dtype_name, gpu_of, is_contiguous, is_torch
from linkweave.kernels.validate import FLOATS
from linkweave.topology.checks import integer

_OPS = ("sum", "avg")


def check_vector(values: Any, indices: Any, numel: Any) -> int:
    """`numel` as an int. Raises CollectiveError for errors visible without reading entries."""
    number = integer(numel, "numel", 0, 1 << 31)
    if gpu_of(values) != gpu_of(indices) or is_torch(values) != is_torch(indices):
        raise CollectiveError("values and indices must be of one library and on one device")
    name, shapes = dtype_name(values), (tuple(values.shape), tuple(indices.shape))
    if name not in FLOATS or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise CollectiveError(
            f"values must be {', '.join(FLOATS)} in one dimension, one for each index, not {name} "
            f"of shape {shapes[0]} for indices of shape {shapes[1]}"
        )
    if (kind := dtype_name(indices)) != "int32":
        raise CollectiveError(f"indices must be int32, not {kind}")
    return number


def check_call(numel: int, k: Any, op: Any, residual: Any, mode: Any, conserve: Any) -> int:
    """`k` as an int. Raises CollectiveError for arguments of a call that are bad."""
    if not isinstance(mode, str) or mode not in ("auto", *MODES):
        raise CollectiveError(f"unknown mode {mode!r}; choose from auto, {', '.join(MODES)}")
    if op not in _OPS:
        raise CollectiveError(f"a sparse_allreduce has op {' or '.join(_OPS)}, not {op!r}")
    wanted = integer(k, "k", 0, numel)
    if not isinstance(conserve, bool | np.bool_):
        raise CollectiveError(f"conserve must be True or False, not {conserve!r}")
    if residual is None and conserve:
        raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
    return wanted


def wrong_indices(numel: int) -> CollectiveError:
    return CollectiveError(f"indices must ascend from 0 to {numel - 1} at most, all different")


def flat_residual(x: Any, numel: int, like: Any) -> Any:
    """A one-dimensional view of a residual. Raises CollectiveError."""
    array = is_torch(x) or isinstance(x, np.ndarray) or gpu_of(x) is not None
    if (
        not array
        or gpu_of(x) != gpu_of(like)
        or dtype_name(x) != "float32"
        or math.prod(x.shape) != numel
        or not is_contiguous(x)
        or (isinstance(x, np.ndarray) and not x.flags.writeable)
    ):
        raise CollectiveError(
            f"residual must be a contiguous, writable float32 array of {numel} elements, on the "
            "values' device"
        )
    return (x.detach() if is_torch(x) else x).reshape(-1)
