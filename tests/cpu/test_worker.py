"""The thread of a communicator's asynchronous calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

from linkweave.collectives.calls.work import Worker

LAST = """
import atexit
from linkweave.collectives.calls.work import Worker
worker = Worker()
assert worker.enqueue(int, "6").result() == 6
atexit.register(lambda: print(worker.enqueue(int, "7").result()))
"""


def test_calls_are_made_while_the_interpreter_exits() -> None:
    words = [sys.executable, "-c", LAST]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60).stdout == "7\n"


def test_calls_keep_their_order_and_errors_reach_their_callers() -> None:
    worker, seen = Worker(), []
    futures = [worker.enqueue(seen.append, i) for i in range(9)]
    assert isinstance(worker.enqueue(int, "x").exception(), ValueError)
    assert [f.result() for f in futures] == [None] * 9 and seen == [*range(9)]
    worker.close(0)
    Worker().close(0)


def test_a_worker_keeps_no_arguments_and_ends_when_it_is_dropped() -> None:
    worker, threads = Worker(), threading.active_count()
    given = Worker()
    kept = weakref.ref(given)
    worker.enqueue(id, given).result()
    del given
    deadline = time.monotonic() + 10
    while kept() is not None:
        assert time.monotonic() < deadline
    assert threading.active_count() == threads + 1
    del worker
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
