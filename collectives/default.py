"""The process-wide default communicator: the one piece of global state."""

from __future__ import annotations

import atexit

from collectives.communicator import Communicator
from collectives.errors import CollectiveError

_default: Communicator | None = None


def set_default(communicator: Communicator | None) -> None:
    """Make it the one that the module functions use; a former one is closed."""
    global _default
    if _default is not None and _default is not communicator:
        _default.close()
    _default = communicator


def get_default() -> Communicator:
    """The default communicator. Raises CollectiveError before `init`."""
    if _default is None:
        raise CollectiveError(
            "no communicator: call collectives.init() first, or run under collectives.spawn()"
        )
    return _default


def shutdown() -> None:
    """Close the default communicator; also done at exit. May be repeated."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


atexit.register(shutdown)
