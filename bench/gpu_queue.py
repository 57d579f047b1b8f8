"""The row of `bench.gpu_suite` for gradient queues."""

from __future__ import annotations

from typing import Any

import numpy as np

from linkweave.bench.gpu_api import Failed, tiled
from linkweave.collectives import plan_allreduce
from linkweave.collectives.runtime.gpu.executor import virtual_ranks
from linkweave.topology import load

GRAPH = 20  # calls captured in one graph
LAYERS, BYTES = 16, 16 << 20


def dequeue(suite: Any) -> dict[str, Any]:
    """Check an early dequeue; time dequeues of a finished layer in a graph of many."""
    nbytes, layers = min(BYTES, suite.largest), LAYERS
    plan = plan_allreduce(load("dgx1-v100"), nbytes, "overlapped_double_tree")
    with virtual_ranks(suite.device, plan.size) as ranks:
        sizes = [nbytes // layers] * layers
        prepared = ranks.prepare(plan, nbytes, "float32", "max", layers=sizes)
        buffers = [suite.device.upload(tiled(r, nbytes)) for r in range(plan.size)]
        begun = {rank: suite.device.make_event() for rank in range(plan.size)}
        end, copy = suite.device.make_event(), suite.device.allocate(sizes[0])
        main, other = suite.device.make_stream(), suite.device.make_stream()
        try:
            slow = round(1e12 / nbytes)  # a link takes a second or more for all
            counted = ranks.run(prepared, buffers, main, slow, begun)
            suite.device.record(end, main)
            suite.device.wait(begun[0], other)
            ranks.dequeue(prepared, counted, 0, 0, other)
            suite.device.copy(copy, buffers[0], sizes[0], other)
            suite.device.synchronise(other)
            early = not suite.device.ready(end)
            first = np.empty(sizes[0] // 4, np.float32)
            ranks.check(main)
            suite.device.download(copy, first)
            if not early:
                raise Failed("a dequeue waited for the whole all-reduce")
            if not np.array_equal(first, tiled(plan.size - 1, nbytes)[: first.size]):
                raise Failed("the first layer is wrong when it is dequeued")

            def calls(stream: int) -> None:
                for _ in range(GRAPH):
                    ranks.dequeue(prepared, counted, 0, layers - 1, stream)

            replayed = suite.seconds(suite.device.capture(calls), ranks.check) / GRAPH
        finally:
            for address in (*buffers, copy):
                suite.device.free(address)
            for event in (*begun.values(), end):
                suite.device.free_event(event)
            for stream in (main, other):
                suite.device.free_stream(stream)
    return {"bytes": nbytes, "dequeue_us": replayed * 1e6}
