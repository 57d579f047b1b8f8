"""What all-reduces of gradients take on this transport: a fit to measured times."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from linkweave.collectives.overlap import Network, fit
from linkweave.collectives.training.transport import Transport

LARGEST = 64 << 20
"""Bytes of the largest all-reduce."""
ROUNDS = 3

Average = Callable[[int, torch.Tensor], None]
"""Averages a tensor over all ranks on a lane, in place; blocks."""


def measure_network(transport: Transport, like: torch.Tensor, average: Average) -> Network:
    """The start-up and the seconds a byte of averages of up to the bytes of `like`, and the
    slowdown of two at once; medians over a few rounds.

    All ranks must call it, while nothing is sent.
    """
    item = like.element_size()
    most = min(like.numel(), LARGEST // item)
    x = transport.empty(most, like.dtype, like.device).zero_()
    transport.open(2)
    sizes = sorted({min(most, n) for n in ((1 << 14) // item, most // 16, most // 4, most)} - {0})
    pairs = [(n * item, _median(partial(average, 0, x[:n]), x)) for n in sizes]
    if len(pairs) == 1:  # a few bytes: all of them are the start-up
        pairs.append((2 * pairs[0][0], pairs[0][1]))
    network = fit(pairs, transport.size).network
    half = most // 2
    both = _median(_at_once(average, x[:half], x[half : 2 * half]), x)
    alone = network.seconds_per_byte * half * item
    gamma = min(2.0, max(1.0, (both - network.startup_s) / alone)) if alone else 1.0
    return replace(network, gamma=gamma, name="measured")


def _at_once(average: Average, first: torch.Tensor, second: torch.Tensor) -> Callable[[], object]:
    """Averages on two lanes at once."""
    if first.device.type != "cuda":
        threads = ThreadPoolExecutor(1)

        def on_threads() -> None:
            other = threads.submit(average, 1, second)
            average(0, first)
            other.result()

        return on_threads

    stream = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]

    def on_streams() -> None:
        average(0, first)
        with torch.cuda.stream(stream):
            average(1, second)

    return on_streams


def _median(call: Callable[[], object], x: torch.Tensor) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        call()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begun)
    return median(times[1:])
