"""Moments of a step: on the host's clock, or in a CUDA stream."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    """What a step is measured by."""

    def now(self) -> Any:
        """This moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two moments."""


class HostClock:
    """Moments are seconds of `time.perf_counter`."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StreamClock:
    """Moments are events in a device's current CUDA stream, so that the host waits only when it
    asks for the time between two."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: Any) -> Clock:
    """The clock for what runs on a torch.device."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
