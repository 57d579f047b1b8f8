"""What is kept of the newest of many, the same on all ranks that add the same."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
MOST = 512


class Newest(dict[_K, _V]):
    """At most `MOST` entries. Looking one up leaves the order as it is: a call that only some ranks
    make, and that is refused, must not change what goes first."""

    def add(self, key: _K, value: _V) -> list[_V]:
        """Returns the older half, which goes where there is no room."""
        full = len(self) >= MOST
        gone = [self.pop(old) for old in list(self)[: MOST // 2]] if full else []
        self[key] = value
        return gone
