"""gTop-k S-SGD: what users choose, and the saved state of its residuals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.topology.checks import integer, number, shown

KEY = "exchange"
"""The entry of an optimizer's first parameter group that holds the state of the exchange, in its
state_dict. An optimizer that loads that before DataParallel has it keeps it there."""


@dataclass(frozen=True)
class GTopK:
    """Exchange a small share of the gradients; the rest stays on the rank that computed it.

    Each rank adds its gradient to a residual and sends the largest entries of that; those that do
    not arrive in the sum are added to later gradients.

    density: the share of the entries that each rank sends, at least one of each all-reduce. With
        "gtopk" as many arrive, with "topk" up to as many from each rank. With 1, gradients are
        averaged as without GTopK, to the bit.
    warmup: densities of the first epochs, of `epoch_steps` steps each; never below `density`. None
        by default. The paper also lowers the learning rate in them, which is the scheduler's part.
    epoch_steps: the steps of each of these epochs.
    per: "bucket" sends the largest entries of all gradients of an all-reduce; "unit" the largest of
        each layer.
    mode: "gtopk" merges entries along a tree, and keeps the largest; "topk" gathers all ranks'
        entries; "auto" takes the one that is predicted to be the fastest for each all-reduce, or
        the dense average: by the network that a schedule "auto" or a policy's name has measured,
        else by the bytes on the critical path.
    conserve: keep in a residual what a merge cuts of an index that arrives from elsewhere, which
        is lost in the paper. So nothing is lost, but training takes more steps.
    select: None for the largest entries, or `select(sums, k, step)`, which returns k different
        positions in `sums`, a residual to which the gradient has been added: integers [k] on its
        device, in any order. It must not change `sums`, and depend on its arguments alone: lanes
        call it from threads of theirs, for each all-reduce or, `per` unit, each layer, and also
        while a network is measured. Positions out of range are an error, on GPUs a failed assertion
        of the device. An entry that is not finite is sent in any case, in place of the first of
        them. What is chosen at random must be the same on all ranks, as merges keep the largest.

    The optimizer, of any kind, is given the averaged entries, and zeros between them: momentum is
    its own. Raises CollectiveError for values out of range.
    Sources: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification
    for Low Bandwidth Networks", algorithm 4 and section IV-B.
    """

    density: float = 0.001
    warmup: tuple[float, ...] = ()
    epoch_steps: int = 100
    per: str = "bucket"
    mode: str = "auto"
    conserve: bool = False
    select: Callable[[Any, int, int], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, tuple | list):
            raise CollectiveError(f"warmup must be a tuple of densities, not {shown(self.warmup)}")
        for density in (self.density, *self.warmup):
            if number(density, "a density", 0, 1) == 0:
                raise CollectiveError(f"a density must be above 0, not {shown(density)}")
        integer(self.epoch_steps, "epoch_steps", 1, 1 << 40)
        if self.select is not None and not callable(self.select):
            raise CollectiveError(f"select must be a function or None, not {shown(self.select)}")
        for name, known in _WORDS.items():
            if (word := getattr(self, name)) not in known:
                raise CollectiveError(
                    f"{name} must be {' or '.join(map(str, known))}, not {shown(word)}"
                )

    def __repr__(self) -> str:
        """Equal on ranks that have the same options: a function is told by its name."""
        values = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        if self.select is not None:
            values["select"] = getattr(self.select, "__qualname__", type(self.select).__name__)
        return f"GTopK({', '.join(f'{name}={value}' for name, value in values.items())})"

    def density_at(self, step: int) -> float:
        """The density of a step, counted from 0."""
        epoch = step // self.epoch_steps
        return max(self.density, *self.warmup[epoch : epoch + 1], 0.0)


_WORDS: dict[str, tuple[Any, ...]] = {
    "per": ("bucket", "unit"), "mode": ("gtopk", "topk", "auto"), "conserve": (True, False)
}  # fmt: skip


def check_state(
    state: dict[str, Any], rank: int, size: int, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise CollectiveError unless an exchange's state is of this rank and of these parameters."""
    if (its := (state["rank"], state["size"])) != (rank, size):
        raise CollectiveError(
            f"the exchange's state is that of rank {its[0]} of {its[1]}, not of rank {rank} of "
            f"{size}: load each rank's own, or training.resharded(all of them, {size})"
        )
    for name, x in state["residual"].items():
        if name not in shapes:
            raise CollectiveError(
                f"the exchange's state has a residual for {name}, which this model lacks"
            )
        if tuple(x.shape) != tuple(shapes[name]):
            raise CollectiveError(
                f"the exchange's state has a residual of shape {tuple(x.shape)} for {name}, "
                f"which has shape {tuple(shapes[name])}"
            )


def keep_in(state: dict[str, Any], kept: Mapping[str, Any]) -> None:
    """Let an optimizer's state_dict have what the exchange of a rank has kept.

    Its key names the rank: a distributed checkpoint has what differs between ranks by its key only.
    """
    head, *others = state["param_groups"]
    mine = {name: kept[name] for name in ("steps", "residual")}
    key = f"rank {kept['rank']} of {kept['size']}"
    state["param_groups"] = [{**head, KEY: {key: mine}}, *others]


def kept_in(state: Mapping[str, Any], rank: int = 0, size: int = 0) -> dict[str, Any]:
    """What the exchange of a rank has kept, in an optimizer's state_dict that may have more than
    one; if it lacks this rank, what that of another has. Empty if there is none."""
    found = {}
    for key, one in state["param_groups"][0].get(KEY, {}).items():
        if not (named := _NAMED.fullmatch(key)):
            raise CollectiveError(f"the optimizer's state has {key!r} where ranks are named")
        found[int(named[1]), int(named[2])] = one
    if not found:
        return {}
    which = (rank, size) if (rank, size) in found else next(iter(found))
    return {"rank": which[0], "size": which[1], **found[which]}


_NAMED = re.compile(r"rank (\d+) of (\d+)")


def resharded(states: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The optimizer's state_dicts for another number of ranks.

    `states` are the state_dicts of all ranks, by rank; one that a distributed checkpoint has put
    together of all stands for each. The residual of old rank r goes to new rank
    r modulo `size`, where residuals are added: their sum over all ranks stays.
    Raises CollectiveError if a rank's state is missing, and for a single rank, which trains without
    an exchange.
    """
    found = [kept_in(one, rank, len(states)) for rank, one in enumerate(states)]
    ranks = [(one.get("rank"), one.get("size")) for one in found]
    if not states or ranks != [(rank, len(states)) for rank in range(len(states))]:
        raise CollectiveError(
            f"resharded needs the state_dicts of all ranks in order, not of (rank, size) {ranks}"
        )
    if integer(size, "size", 1, 1 << 20) == 1:
        raise CollectiveError(
            "a single rank trains without an exchange: it would lose what has not been sent"
        )
    made = []
    for rank in range(size):
        given = [one["residual"] for one in found[rank::size]]
        residual = {
            name: sum((one[name] for one in given[1:]), given[0][name].clone())
            for name in (given[0] if given else ())
        } or {name: x.new_zeros(x.shape) for name, x in found[0]["residual"].items()}
        state = {**states[rank % len(states)]}
        keep_in(state, {**found[0], "rank": rank, "size": size, "residual": residual})
        made.append(state)
    return made
