"""Registers the backend "linkweave" with torch.distributed.

A module of its own that imports little: `import torch` loads it through the entry-point group
`torch.backends`.
"""

from __future__ import annotations

from typing import Any

NAME = "linkweave"
OLDEST = 2, 13
"""The version of torch that gave the verbs of process groups their present names."""


def register() -> None:
    """Make `init_process_group("linkweave")` known to torch. May be repeated."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, of_nccl: object) -> Any:
    import torch

    from linkweave.collectives.errors import CollectiveError

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise CollectiveError(
            f"the backend {NAME} needs torch {'.'.join(map(str, OLDEST))} or later, whose process "
            f"groups call other methods than those of {torch.__version__}"
        )
    from linkweave.collectives.distributed.group import Group

    return Group(options, of_nccl)
