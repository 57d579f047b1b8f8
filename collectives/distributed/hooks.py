"""Communication hooks for `DistributedDataParallel.register_comm_hook(state, hook)`.

`state` is the communicator, or a process group of backend "linkweave"; None stands for the default
group if that is one, and else for the default communicator. A hook returns a future of the bucket,
averaged over the ranks.
"""

# DDP compares the annotations of a hook with its own classes, so they must not be strings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from linkweave.collectives.calls.communicator import Communicator, get_default
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.distributed.group import Group
from linkweave.collectives.distributed.works import GroupWork
from linkweave.collectives.errors import CollectiveError
from linkweave.kernels import cast
from linkweave.topology.checks import shown

Future = torch.futures.Future[torch.Tensor]


def allreduce_hook(state: Any, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
    """All-reduce a bucket by the communicator's plans, whatever backend DDP itself uses."""
    x = bucket.buffer()
    work = _communicator(state).allreduce(x, "avg", async_op=True)
    return GroupWork(work, [x]).get_future().then(lambda done: done.value()[0])


def fp16_hook(state: Any, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
    """All-reduce a bucket in float16, divided by the number of ranks before it is rounded.

    Half the bytes of float32; 16-bit gradients are sent as they are. Gradients above 65,504 times
    the number of ranks become infinite; the sum is rounded at each combining step.
    """
    return _in_16_bits(torch.float16, state, bucket)


def bf16_hook(state: Any, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
    """As `fp16_hook` in bfloat16, which has float32's range and 8 bits of precision."""
    return _in_16_bits(torch.bfloat16, state, bucket)


def _in_16_bits(dtype: torch.dtype, state: Any, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
    x, communicator = bucket.buffer(), _communicator(state)
    if x.element_size() == 2:
        return allreduce_hook(state, bucket)
    short = torch.empty_like(x, dtype=dtype)
    cast(x, short, 1 / communicator.size)
    work = communicator.allreduce(short, async_op=True)

    def widen(done: Any) -> Any:
        done.value()  # raises what the all-reduce raised
        return x.copy_(short)

    back: Callable[[Any], Any] = widen
    return GroupWork(work, [short]).get_future().then(back)


def _communicator(state: Any) -> Any:
    if state is None and dist.is_initialized() and isinstance(dist.group.WORLD, Group):
        state = dist.group.WORLD
    if isinstance(state, Group):
        return state.communicator
    state = get_default() if state is None else state
    if isinstance(state, Communicator | ClusterCommunicator):
        return state
    raise CollectiveError(
        "the state of this hook must be a communicator, a process group of backend "
        f'"linkweave", which dist.new_group(..., backend="linkweave") makes, or None, not '
        f"{shown(state)}"
    )
