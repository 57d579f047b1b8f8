"""gloo groups of torch.distributed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d


def gloo_group(store: Any, rank: int, size: int, timeout: float, lazy: bool = True) -> Any:
    """A gloo group of `size` ranks. Deleting it closes its connections.

    `timeout` is in seconds. With `lazy`, two ranks connect when they first exchange data, for which
    the first waits for the second, even in an asynchronous call.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_device(lazy)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


def _device(lazy: bool) -> Any:
    """The network interface of GLOO_SOCKET_IFNAME, or else the one that leads to MASTER_ADDR."""
    gloo: Any = c10d.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=names.split(",")[0], lazy_init=lazy)
    if address := _own_address(os.environ.get("MASTER_ADDR", "")):
        return gloo.create_device(hostname=address, lazy_init=lazy)
    return gloo.create_default_device(lazy_init=lazy)


def _own_address(peer: str) -> str:
    """The address from which this machine reaches `peer`; empty if it does not."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
