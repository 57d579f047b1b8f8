"""A piece of memory, as the runtimes see it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous piece of memory; `owner` keeps it."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int
    owner: object = field(default=None, compare=False, repr=False)
