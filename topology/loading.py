"""`topology.load`: one door for names, files and texts."""

from __future__ import annotations

import os
from pathlib import Path

from topology.errors import TopologyError
from topology.graph import Topology
from topology.machines import NAMES, machine


def load(spec: str | os.PathLike[str] | Topology) -> Topology:
    """The topology that `spec` means.

    A machine's name (`topology.NAMES`), the path of a JSON file, JSON text, or "auto": the ranks
    of this machine's CPUs. A Topology passes through. Raises TopologyError otherwise.
    """
    if isinstance(spec, Topology):
        return spec
    text = os.fspath(spec)
    if not isinstance(text, str):
        raise TopologyError(f"a topology is named by text or a path, not {spec!r}")
    if text == "auto":
        return load(f"cpu-{os.cpu_count() or 1}")
    if text.lstrip().startswith("{"):
        return Topology.from_json(text)
    if found := machine(text):
        return found
    path = Path(text)
    if os.path.isfile(text):
        try:
            return Topology.from_json(path.read_text(), where=text)
        except UnicodeDecodeError:
            raise TopologyError(f"{text}: not a text file") from None
    raise TopologyError(
        f"unknown machine {text!r}: no such file, and no such name; names are {', '.join(NAMES)}"
    )
