"""What can go wrong with a plan or a running collective; all are `CollectiveError`s."""

from __future__ import annotations

from linkweave.topology.errors import CollectiveError, TopologyError

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveTimeout",
    "PlanError",
    "TopologyError",
]


class PlanError(CollectiveError):
    """No plan can be made as asked, or a plan is wrong."""


class _Stuck(CollectiveError):
    """Says where a rank stood; every field is None where it was not inside a plan's step."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        channel: int | None = None,
        step: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.channel = rank, peer, channel
        self.step, self.chunk = step, chunk

    def fields(self) -> dict[str, int | None]:
        """Where the rank stood, as keywords."""
        names = ("rank", "peer", "channel", "step", "chunk")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[object, ...]:  # keeps the fields when a child process sends it
        return (type(self), self.args, self.__dict__)


class CollectiveTimeout(_Stuck):
    """A rank waited past the deadline; the message names rank, peer, channel, step and chunk."""


class CollectiveAborted(_Stuck):
    """Another rank died or gave up, so this one stopped; the message says which and where."""
