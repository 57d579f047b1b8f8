"""The thread of a communicator's asynchronous calls."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from queue import SimpleQueue

import pytest

from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.work import Worker, _ended

LAST = """
import atexit
from linkweave.collectives.calls.work import Worker
worker = Worker()
assert worker.enqueue(int, "6").result() == 6
atexit.register(lambda: print(worker.enqueue(int, "7").result()))
"""


def test_calls_are_made_while_the_interpreter_exits() -> None:
    words = [sys.executable, "-c", LAST]
    assert subprocess.run(words, capture_output=True, text=True, timeout=280).stdout == "7\n"


def test_calls_keep_their_order_and_errors_reach_their_callers() -> None:
    worker, seen = Worker(), []
    futures = [worker.enqueue(seen.append, i) for i in range(9)]
    assert isinstance(worker.enqueue(int, "x").exception(), ValueError)
    assert [f.result() for f in futures] == [None] * 9 and seen == [*range(9)]
    worker.close(0)
    Worker().close(0)


def test_a_worker_keeps_no_arguments_and_ends_when_it_is_dropped() -> None:
    worker, given = Worker(), Worker()
    kept = weakref.ref(given)
    worker.enqueue(id, given).result()
    del given
    deadline = time.monotonic() + 60
    while kept() is not None:
        assert time.monotonic() < deadline
    thread = worker._thread
    assert thread is not None and thread.is_alive()
    del worker
    thread.join(60)
    assert not thread.is_alive()


def test_a_closed_worker_refuses_calls() -> None:
    worker = Worker()
    worker.close(0)
    with pytest.raises(CollectiveError, match="closed"):
        worker.enqueue(int)


def test_calls_under_way_are_finished_before_the_interpreter_exits() -> None:
    words = "import time; worker.enqueue(lambda: (time.sleep(0.3), print('done', flush=True)))"
    code = f"from linkweave.collectives.calls.work import Worker; worker = Worker(); {words}"
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, timeout=280).stdout == "done\n"


def test_threads_of_callbacks_are_gone_before_the_interpreter_ends() -> None:
    """Also for the system, which still runs their destructors when Python has forgotten them."""
    worker, begun, told = Worker(), threading.Event(), SimpleQueue[int]()

    def callback(_: object) -> None:
        told.put(threading.get_native_id())
        time.sleep(0.2)

    worker.submit(True, begun.wait).add_done_callback(callback)
    begun.set()
    task = f"/proc/self/task/{told.get()}"
    _ended()
    assert not os.path.exists(task)
    worker.close(0)


def test_threads_that_wait_carry_out_calls_in_order() -> None:
    worker, seen = Worker(), []
    for n in range(300):
        works = [worker.submit(True, seen.append, (n, i)) for i in range(3)]
        waits = [threading.Thread(target=work.wait) for work in works[::-1]]
        for thread in waits:
            thread.start()
        works[1].wait()
        for thread in waits:
            thread.join(60)
        assert all(work.done() and work.wait() is None for work in works)
    assert seen == [(n, i) for n in range(300) for i in range(3)]
    worker.close(0)


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_reaches_the_thread_that_waits() -> None:
    worker = Worker()
    started, go_on = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go_on.wait(60)

    before = worker.submit(True, first)
    assert started.wait(60)  # in the worker's thread, which keeps the turn
    work = worker.submit(True, int, "6")
    go_on.set()
    assert work.wait() == 6 and before.wait() is None
    worker._calls._turn.acquire()  # so that the worker's thread leaves the next one to us
    work = worker.submit(True, interrupted)
    while not worker._calls._woken.empty():
        time.sleep(0.001)
    worker._calls._turn.release()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert worker.submit(True, int, "7").wait() == 7
    worker.close(0)
