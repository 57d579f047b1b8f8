"""Asynchronous collectives: the handles that callers get, and who runs calls on the CPU."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from linkweave.collectives.errors import CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.topology.checks import integer

log = logging.getLogger("linkweave")

_POLL, _PAUSE = 0.05, 0.001  # s


class Work(Protocol):
    """Handle of an asynchronous collective."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the collective and return its result.

        On the CPU this blocks until the tensor holds the result. On a GPU it makes the current
        stream wait; the host blocks only if `timeout` (seconds) is given. Raises what the
        collective raised, or CollectiveTimeout after `timeout` seconds.
        """

    def done(self) -> bool:
        """Whether the collective has finished."""


class GradientQueue(Work, Protocol):
    """Handle of an all-reduce whose layers can be used before all of it is done.

    Until `wait` returns, read the tensor only where `dequeue` allows it and do not write to it:
    other ranks may still read it. Source: C-Cube, figure 9.
    """

    def dequeue(self, layer: int) -> None:
        """Wait for one layer.

        Layers are counted from 0 and may be dequeued in any order, and more than once. On the CPU
        the call returns when the layer's gradients are final. On a GPU it makes the current stream
        wait for them and returns at once. Raises CollectiveError if there is no such layer, and
        what the collective raised.
        """


class HostWork:
    """`Work` of a CPU call. Who waits without a timeout carries out the `calls` up to it."""

    def __init__(self, future: Future[Any], calls: _Calls | None = None) -> None:
        self._future, self._calls = future, calls
        self._retrieved = False

    def wait(self, timeout: float | None = None) -> Any:
        if self._calls and timeout is None:
            self._calls.help(self._future)
        try:
            self._future.exception(timeout)
        except TimeoutError:
            raise CollectiveTimeout(f"the collective is not done after {timeout} s") from None
        self._retrieved = True
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, function: Callable[[Future[Any]], None]) -> None:
        """Call `function` when the collective has finished: at once if it has, else from a thread
        of its own, as it may wait for later collectives of the same communicator."""
        if self.done():
            function(self._future)
        else:
            self._future.add_done_callback(partial(_apart, function))

    @property
    def unretrieved_error(self) -> BaseException | None:
        """The error of the finished call if nobody has waited for it."""
        if self._retrieved or not self._future.done():
            return None
        return self._future.exception()


class HostQueue(HostWork):
    """`GradientQueue` of a CPU call. `abort` is the address of the arena's abort flag."""

    def __init__(self, future: Future[Any], counters: LayerCounters, abort: int) -> None:
        super().__init__(future)
        self._counters, self._abort = counters, abort

    def dequeue(self, layer: int) -> None:
        while not self._counters.begun.wait(_POLL):
            if self.done():
                self.wait()  # raises the call's error
        index = integer(layer, "layer", 0, self._counters.layers - 1)
        # `done` is tested first: once the call is done, the memory at `abort` may be unmapped
        while not self.done() and not self._counters.wait(index, self._abort):
            time.sleep(_PAUSE)  # once the call has failed, until it is done
        if self.done():
            self.wait()


_CALLBACKS: deque[threading.Thread] = deque(maxlen=64)


def _apart(function: Callable[[Future[Any]], None], future: Future[Any]) -> None:
    """Call the function from a thread of its own."""
    thread = threading.Thread(target=function, args=(future,), name="linkweave-callback")
    _CALLBACKS.append(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits
        function(future)


def _joined() -> list[threading.Thread]:
    """The last threads of callbacks, which have ended."""
    found = [thread for thread in list(_CALLBACKS) if thread.ident is not None]
    for thread in found:
        thread.join()
    return found


@atexit.register
def _ended() -> None:
    """Wait until the system has ended the last of these threads: destructors of torch's variables
    in them take the GIL, and abort the process once there is no interpreter."""
    for thread in _joined():
        task, deadline = f"/proc/self/task/{thread.native_id}", time.monotonic() + 1
        while os.path.exists(task) and time.monotonic() < deadline:
            time.sleep(_PAUSE)


class _Calls:
    """Calls in their order. Whoever has the turn carries out the oldest: the worker's thread, or a
    thread that waits for one of them and so saves two hand-overs."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._turn = threading.Lock()
        self._woken: SimpleQueue[bool] = SimpleQueue()  # False ends the worker's thread

    def add(self, future: Future[Any], body: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._waiting.append((future, body, args))
        self._woken.put(True)

    def end(self) -> None:
        """Let the worker's thread end after the calls so far."""
        self._woken.put(False)

    def help(self, future: Future[Any]) -> None:
        """Carry out calls until that of `future` is done, unless another thread has the turn."""
        try:
            self._take_turn(False, future)
        finally:
            if self._waiting:  # the worker's thread may have come while this one had the turn
                self._woken.put(True)

    def carry_out_all(self) -> None:
        """Carry out the calls so far, after whoever has the turn: who has also told the callbacks
        of those before."""
        self._take_turn(True)

    def work(self) -> None:
        """Carry out calls until `end`, in the worker's thread."""
        while self._woken.get():
            self._take_turn(False)  # who has it wakes this thread again
        self.carry_out_all()

    def _take_turn(self, wait: bool, future: Future[Any] | None = None) -> None:
        """Carry out the calls so far, or those until `future` is done, if the turn is free or one
        is to `wait` for it."""
        if self._turn.acquire(blocking=wait):
            try:
                while self._waiting and not (future and future.done()):
                    self._carry_out_oldest()
            finally:
                self._turn.release()

    def _carry_out_oldest(self) -> None:
        """Keeps nothing of the call afterwards. An interrupt is also raised here, in the thread
        that waits."""
        future, body, args = self._waiting.popleft()
        try:
            future.set_result(body(*args))
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            del future, body, args


def _drained(worker: weakref.ref[Worker]) -> None:
    found = worker()
    if found and found._thread and found._thread.is_alive():  # not so in a forked process
        last = None
        while last is not found._last:  # a callback may make another call
            last = found._last
            found._calls.carry_out_all()
            _joined()


class Worker:
    """Runs one communicator's asynchronous CPU calls in order, in a thread or in those that wait.

    The thread starts with the first call, and ends with `close` or with this object. Once started
    it takes calls even while the interpreter exits, as executors do not: other ranks may wait for
    the rest of a step. Calls under way are finished before the interpreter exits.
    """

    def __init__(self) -> None:
        self._calls = _Calls()
        self._thread: threading.Thread | None = None
        self._lock, self._closed = threading.Lock(), False
        self._at_exit = partial(_drained, weakref.ref(self))
        self._last: Future[Any] | None = None
        self._works: list[HostWork] = []  # unfinished, or with an error nobody has retrieved

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def drain(self) -> None:
        """Wait until all calls have finished. Does not raise their errors."""
        if self._last is not None:
            self._calls.help(self._last)
            self._last.exception()

    def enqueue(self, body: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise CollectiveError("this communicator is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._calls.work, name="linkweave", daemon=True)
                thread.start()
                self._thread = thread
                weakref.finalize(self, self._calls.end).atexit = False
                atexit.register(self._at_exit)
            self._last = future
            self._calls.add(future, body, args)
        return future

    def submit(self, async_op: bool, body: Callable[..., Any], *args: Any) -> Any:
        """Carry out a call: at once in this thread, if nothing is before it and the caller waits
        for it; else behind the calls before it. Returns its result, or a handle."""
        if not async_op and self.idle:
            return body(*args)
        work = HostWork(self.enqueue(body, *args), self._calls)
        return self.keep(work) if async_op else work.wait()

    def keep(self, work: HostWork) -> HostWork:
        """Remember a handle given to the caller, so that `close` can log its error."""
        self._works = [w for w in self._works if w.unretrieved_error or not w.done()] + [work]
        return work

    def close(self, rank: int) -> None:
        """Finish all calls, and log errors that nobody has retrieved."""
        with self._lock:
            self._closed = True
            self._calls.end()
        if self._thread:
            self._thread.join()
        atexit.unregister(self._at_exit)
        for work in self._works:
            if work.unretrieved_error:
                log.error("rank %d: nobody waited for an asynchronous call, which raised %s",
                          rank, work.unretrieved_error)  # fmt: skip
