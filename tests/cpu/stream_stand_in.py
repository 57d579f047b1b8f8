"""CUDA streams made of threads: work is enqueued in order, and runs later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        STREAMS.append(self)

    def _run(self) -> None:
        while (body := self._work.get()) is not None:
            body()

    def enqueue(self, body: Callable[[], object]) -> None:
        self._work.put(body)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._passed = threading.Event()
        self._moment = 0.0

    def record(self, stream: Stream | None = None) -> None:
        (stream or CURRENT[-1]).enqueue(self._pass)

    def _pass(self) -> None:
        self._moment = time.perf_counter()
        self._passed.set()

    def synchronize(self) -> None:
        assert self._passed.wait(60)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._moment - self._moment)


CURRENT: list[Stream] = []
STREAMS: list[Stream] = []


@contextmanager
def stream(of: Stream) -> Iterator[None]:
    CURRENT.append(of)
    yield
    CURRENT.pop()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The current stream; torch.cuda is the stand-in."""
    for name, what in (("Stream", Stream), ("Event", Event), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: CURRENT[-1])
    CURRENT[:] = [Stream()]
    yield CURRENT[0]
    while STREAMS:  # a process with threads is not forked
        STREAMS.pop().end()
