"""Errors of plans and running collectives. All derive from `CollectiveError`."""

from __future__ import annotations

from linkweave.topology.checks import CollectiveError, TopologyError

__all__ = [
    "CollectiveAborted", "CollectiveError", "CollectiveTimeout", "OutOfMemory", "PlanError",
    "TopologyError",
]  # fmt: skip


class PlanError(CollectiveError):
    """A plan is wrong, or none can be made as asked."""


class OutOfMemory(CollectiveError):
    """A GPU has no memory for a call. No rank makes it, and later calls may succeed."""


class _Stuck(CollectiveError):
    """An error with the step of the plan that a rank had reached; fields not known are None."""

    def __init__(
        self, message: str, *, rank: int | None = None, peer: int | None = None,
        channel: int | None = None, step: int | None = None, chunk: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.rank, self.peer, self.channel = rank, peer, channel
        self.step, self.chunk = step, chunk

    def fields(self) -> dict[str, int | None]:
        """The fields as keyword arguments."""
        names = ("rank", "peer", "channel", "step", "chunk")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[object, ...]:  # pickles the fields as well
        return (type(self), self.args, self.__dict__)


class CollectiveTimeout(_Stuck):
    """A rank waited past its deadline. The message names rank, peer, channel, step and chunk."""


class CollectiveAborted(_Stuck):
    """This rank stopped because another one died or failed. The message says which and where."""
