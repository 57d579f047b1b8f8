"""The row of `bench.gpu_suite` for gradient queues."""

from __future__ import annotations

from functools import partial

from linkweave.bench.gpu_meter import Meter, settings_of
from linkweave.bench.gpu_runner import Failed, Result
from linkweave.collectives import plan_allreduce
from linkweave.topology import load

LAYERS = 16


def dequeue(meter: Meter, nbytes: int) -> Result:
    """Check an early dequeue; time dequeues of a finished layer in a graph of many."""
    device = meter.device
    plan = plan_allreduce(load("dgx1-v100"), nbytes, "overlapped_double_tree")
    with meter.ranks(plan.size) as ranks, meter.filled(plan.size, nbytes) as memory:
        buffers, layer = memory.buffers, nbytes // LAYERS
        prepared = ranks.prepare(plan, nbytes, "float32", "max", layers=[layer] * LAYERS)
        begun = {rank: device.make_event() for rank in range(plan.size)}
        end, copy = device.make_event(), device.allocate(layer)
        main, other = device.make_stream(), device.make_stream()
        first = memory.largest[: layer // 4]

        def early(ps_per_byte: int) -> bool:
            """Whether the first layer can be copied before the call has ended."""
            for address in (*buffers, copy):
                device.zero(address, layer, main)
            counted = ranks.run(prepared, buffers, main, ps_per_byte, begun, inputs=memory.inputs)
            device.record(end, main)
            device.wait(begun[0], other)
            ranks.dequeue(prepared, counted, 0, 0, other)
            device.copy(copy, buffers[0], layer, other)
            device.synchronise(other)
            found = not device.ready(end)
            ranks.check(main)
            meter.expect(copy, first, "the first layer when it is dequeued")
            return found

        early(0)  # whatever is loaded at its first use may wait for the GPU
        if not early(round(1e12 / nbytes)):  # a link takes a second or more for all
            raise Failed("a dequeue waited for the whole all-reduce")
        counted = ranks.run(prepared, buffers, main, 0, begun)
        ranks.check(main)
        last = partial(ranks.dequeue, prepared, counted, 0, LAYERS - 1)
        replayed = meter.replayed(last, ranks.check)
        settings = settings_of(ranks, prepared, nbytes)
        device.free(copy)
        for event in (*begun.values(), end):
            device.free_event(event)
        for stream in (main, other):
            device.free_stream(stream)
    return {"bytes": nbytes, "dequeue_us": replayed * 1e6, "settings": settings}
