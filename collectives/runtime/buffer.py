"""The runtimes' view of a tensor: a buffer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory of one dtype; `owner` keeps it alive."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int
    owner: object = field(default=None, compare=False, repr=False)
