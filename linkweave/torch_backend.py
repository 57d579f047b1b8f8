"""Registers the backend "linkweave" with torch.distributed.

A module of its own that imports little: `import torch` loads it through the entry-point group
`torch.backends`.
"""

from __future__ import annotations

from typing import Any

NAME = "linkweave"


def register() -> None:
    """Make `init_process_group("linkweave")` known to torch. May be repeated."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: object) -> Any:
    from linkweave.collectives.distributed.group import Group

    return Group(options)
