"""The process-wide default communicator: the one piece of global state."""

from __future__ import annotations

import atexit
import threading

from linkweave.collectives.communicator import Communicator
from linkweave.collectives.errors import CollectiveError

_default: Communicator | None = None
_threads = threading.local()  # of ranks that are threads: each has its own


def set_default(communicator: Communicator | None) -> None:
    """Make it the one that the module functions use; a former one is closed."""
    global _default
    if _default is not None and _default is not communicator:
        _default.close()
    _default = communicator


def set_of_thread(communicator: Communicator | None) -> None:
    """Make it this thread's; None: this thread has none of its own."""
    _threads.communicator = communicator


def get_default() -> Communicator:
    """The default communicator. Raises CollectiveError before `init`."""
    of_thread: Communicator | None = getattr(_threads, "communicator", None)
    if of_thread is not None:
        return of_thread
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
