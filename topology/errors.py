"""The root of the exception family, and the errors of the wiring itself."""


class CollectiveError(Exception):
    """Everything linkweave raises on purpose derives from this."""


class TopologyError(CollectiveError):
    """A machine that is unknown, malformed, or cannot do what was asked of it."""
