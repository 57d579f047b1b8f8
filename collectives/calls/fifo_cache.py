"""A bounded dictionary that evicts the oldest entries."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
MOST = 512


class FifoCache(dict[_K, _V]):
    """A dictionary of at most `MOST` entries.

    Ranks that add the same keys evict the same keys. Lookups do not change the order: a call that
    only some ranks make, and that is then refused, must not change what is evicted.
    """

    def add(self, key: _K, value: _V) -> list[_V]:
        """Add an entry. A full cache first drops its older half, which is returned."""
        full = len(self) >= MOST
        gone = [self.pop(old) for old in list(self)[: MOST // 2]] if full else []
        self[key] = value
        return gone
