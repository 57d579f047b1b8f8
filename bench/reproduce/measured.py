"""Our measurements, as `bench/results` holds them, for tables beside papers' values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linkweave.bench import timing
from linkweave.bench.reproduce.rows import Row

RESULTS = Path(__file__).parents[1] / "results"


_HOSTS = "python tests/net/hosts.py"
_EIGHT = "torchrun --standalone --nproc-per-node 8 -m linkweave bench train --batch 2 -r 3"
_CNN = "bench convergence --task digits"
_STEPS = ("resnet50", "vgg16", "bert-base")
_CHAINED = {"vgg16": "a=1.776ms,b=0.3177ns", "resnet50": "a=0.825ms,b=0.79895ns",
            "bert-base": "a=0.8ms,b=0.17983ns"}  # fmt: skip
COMMANDS = {
    "algorithms-cpu-8-epyc-2-cores": "linkweave bench algorithms -n 8",
    "queue-4-epyc-2-cores": "linkweave bench queue -n 4",
    "network-4x2-1gbit": f"{_HOSTS} 4x2 1gbit bench network",
    "network-4x2-10gbit": f"{_HOSTS} 4x2 10gbit bench network",
    **{f"steps-{name}-epyc-2-cores": f"linkweave bench steps --profile {name}" for name in _STEPS},
    **{f"steps-even-{name}-epyc-2-cores": f"linkweave bench steps --profile {name} --even"
       for name in ("resnet152", "inceptionv4")},
    **{f"steps-gtopk-{name}-epyc-2-cores":
       f"linkweave bench steps --profile {name} --density 0.01 --network a=1ms,b=0.5ns "
       "--workers 4 --seconds 1.5" for name in ("resnet50", "vgg16")},
    "steps-embedding-bert-base-epyc-2-cores": "linkweave bench steps -n 2 --profile bert-base "
    "--network a=0.2ms,b=0.4ns --workers 4 --policy mg-wfbp --tokens 8000",
    **{f"chaining-{name}-epyc-2-cores":
       f"linkweave bench steps --profile {name} --policy c-cube --unchained --network {network}"
       for name, network in _CHAINED.items()},
    **{f"train-c-cube-{name.lower()}-8-epyc-2-cores":
       f"LINKWEAVE_ALGORITHM={algorithm} {_EIGHT} --schedule c-cube{unchained}"
       for name, algorithm, unchained in (
           ("B", "double_tree", " --unchained"), ("C1", "overlapped_double_tree", " --unchained"),
           ("C2", "double_tree", ""), ("CC", "overlapped_double_tree", ""),
           ("R", "ring", " --unchained"))},
    **{f"train-c-cube{words}-4x1-1gbit":
       f"{_HOSTS} 4x1 1gbit bench train --schedule c-cube{unchained} -r 3"
       for words, unchained in (("", ""), ("-unchained", " --unchained"))},
    **{f"gtopk-vgg16-{hosts}-hosts-{rate}":
       f"{_HOSTS} {hosts}x1 {rate} bench gtopk --model vgg16{options}"
       for hosts, rate, options in ((4, "1gbit", ""), (8, "1gbit", ""),
                                    (8, "250mbit", " --hook gTop-k"))},
    **{f"gtopk-resnet20-{hosts}-hosts-{rate}":
       f"{_HOSTS} {hosts}x1 {rate} bench gtopk --model resnet20 -r {rounds}"
       for hosts, rate, rounds in ((4, "1gbit", 15), (8, "1gbit", 15), (8, "100mbit", 9))},
    **{f"gtopk-half-{hosts}-hosts-{rate}":
       f"{_HOSTS} {hosts}x1 {rate} bench gtopk --model resnet20 --density 0.5 --hook top-k "
       f"--hook gTop-k -r {rounds}"
       for hosts, rate, rounds in ((16, "100mbit", 3), (32, "100mbit", 3))},
    "convergence-digits-4-epyc-2-cores": f"linkweave {_CNN} --seeds 8 --steps 260 -x density=0.01",
    "convergence-digits-7-epyc-2-cores":
        f"linkweave {_CNN} -n 7 --seeds 8 --steps 260 -x density=0.01",
    "convergence-digits-4-long-epyc-2-cores":
        f"linkweave {_CNN} --seeds 2 --steps 1500 -x density=0.001",
    "convergence-digits-4-warm-up-epyc-2-cores":
        f"linkweave {_CNN} --steps 400 --seeds 5 -x density=0.001,warmup=on "
        "-x density=0.001,warmup=on,conserve=on -x density=0.01,warmup=on",
    "convergence-bible-4-epyc-2-cores":
        "linkweave bench convergence --task bible --seeds 8 --steps 250 -x density=0.01",
    **{f"embedding-{rows}-4-hosts-1gbit": f"{_HOSTS} 4x1 1gbit bench embedding --rows {rows}"
       for rows in (12605, 131072)},
}  # fmt: skip
"""The command that writes each record, with --out; hosts need root and a checkout."""


@dataclass(frozen=True)
class Recorded:
    """The rows of a file that a benchmark wrote; `where` has its date and machine."""

    name: str
    rows: tuple[dict[str, Any], ...]
    where: str

    def row(self, **fields: Any) -> dict[str, Any]:
        """The row that has these fields. Raises LookupError if there is none."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in fields.items()):
                return row
        raise LookupError(f"{self.name} has no row with {fields}")


def recorded(name: str) -> Recorded:
    """The file bench/results/NAME.json. Raises OSError if it is not there."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    machine = data["machine"]
    where = _words(machine) if isinstance(machine, dict) else f"{data['date']}, {machine}"
    return Recorded(name, tuple(data["rows"]), where)


def here() -> str:
    """Today, and this machine, in the words of `Recorded.where`."""
    return _words(timing.machine())


def _words(machine: dict[str, Any]) -> str:
    return f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores"


def measured(
    item: str, what: str, theirs: float | str | None, how: str, name: str,
    of: Callable[[Recorded], float | str], unit: str = "", reason: str = "",
) -> Row:  # fmt: skip
    """A row whose value comes from a recorded file, which the row names."""
    found = recorded(name)
    return Row(item, what, theirs, of(found), f"{how}, {found.where}", unit, reason, name)
