"""The default communicator, the only global state."""

from __future__ import annotations

import atexit
import threading
from typing import Any, cast

from linkweave.collectives.calls.communicator import Communicator
from linkweave.collectives.errors import CollectiveError

_default: Any = None  # a Communicator or a ClusterCommunicator
_threads = threading.local()  # each rank that is a thread has its own


def set_default(communicator: Any) -> None:
    """Set the communicator that the module functions use, and close the previous one."""
    global _default
    if _default is not None and _default is not communicator:
        _default.close()
    _default = communicator


def set_of_thread(communicator: Communicator | None) -> None:
    """Set the default communicator of this thread; None removes it."""
    _threads.communicator = communicator


def get_default() -> Communicator:
    """The default communicator of this rank. Raises CollectiveError if there is none.

    For ranks on several machines it is a `ClusterCommunicator`, which has most of its methods.
    """
    of_thread: Communicator | None = getattr(_threads, "communicator", None)
    if of_thread is not None:
        return of_thread
    if _default is None:
        raise CollectiveError(
            "no communicator: call linkweave.init() first, or run under linkweave.spawn()"
        )
    return cast(Communicator, _default)


def shutdown() -> None:
    """Close the default communicator. Runs at exit as well, and may be repeated."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


atexit.register(shutdown)
