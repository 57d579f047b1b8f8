"""Checks of sparse vectors and residuals of any library, on any device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.tensors import dtype_name, gpu_of, is_contiguous, is_torch
from linkweave.kernels.validate import FLOATS
from linkweave.topology.checks import integer


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
