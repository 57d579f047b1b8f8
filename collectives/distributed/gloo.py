"""gloo groups of torch.distributed."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d

from linkweave.collectives.errors import CollectiveTimeout


def gloo_group(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A gloo group of `size` ranks, connected to each other. Deleting it closes its connections.

    `timeout` is in seconds. Raises CollectiveTimeout if they do not connect. Connecting later
    (gloo's `lazy_init`) would block asynchronous calls, and without a deadline while a link is
    down.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    try:
        options._devices = [_device()]
        return gloo(store, rank, size, options)
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"rank {rank} of {size} cannot connect to the others: {error}", rank=rank
        ) from error


def timed_out(error: Exception) -> bool:
    """Whether an error of gloo says that a deadline has passed."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def _device() -> Any:
    """The network interface of GLOO_SOCKET_IFNAME, or else the one that leads to MASTER_ADDR."""
    gloo: Any = c10d.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=names.split(",")[0])
    if address := _own_address(os.environ.get("MASTER_ADDR", "")):
        return gloo.create_device(hostname=address)
    return gloo.create_default_device()


def _own_address(peer: str) -> str:
    """The address from which this machine reaches `peer`; empty if it does not.

    On the machine of `peer` itself that may be a loopback address, which no other machine reaches.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
        loops = own.startswith("127.") or own == "::1"
        return "" if loops and peer not in ("localhost", own) else own
    except OSError:
        return ""
