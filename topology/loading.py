"""`topology.load`: one door for names, files, texts and this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from linkweave.topology.clusters import looks_like_cluster, parse_cluster
from linkweave.topology.detect import detect
from linkweave.topology.errors import TopologyError
from linkweave.topology.machines import NAMES, machine
from linkweave.topology.measured import looks_like_p2p, overlay
from linkweave.topology.nccl_xml import parse_nccl_xml
from linkweave.topology.parse_smi import looks_like_smi, parse_smi
from linkweave.topology.topology import Topology

LARGEST = 32 << 20  # bytes of a file
_NCCL_TESTS = re.compile(r"\balgbw\s+busbw\b")


def load(
    spec: str | os.PathLike[str] | Topology, measured: str | os.PathLike[str] | None = None
) -> Topology:
    """The topology that `spec` means.

    A machine's name (`topology.NAMES`); several of them joined, "16 x dgx-a100 nics=rail" (see
    `topology.clusters`); the path of a file, or its text: what `nvidia-smi topo -m` printed, an
    NCCL topology (XML), `Topology.to_json`'s JSON, or a cluster's description; or "auto": the GPUs
    of this machine, else the ranks of its CPUs. A Topology passes through.

    `measured` lays figures over the nominal ones: the path or text of what `linkweave bench links`
    wrote or p2pBandwidthLatencyTest printed. Raises TopologyError, saying what is wrong where.
    """
    made = spec if isinstance(spec, Topology) else _load(spec)
    if measured is None:
        return made
    given = os.fspath(measured)
    if not isinstance(given, str):
        raise TopologyError(f"measured figures are a path or text, not {measured!r}")
    if _is_text(given):
        return overlay(made, given, "measured figures")
    if not os.path.isfile(given):
        raise TopologyError(f"measured figures: no file {given!r}")
    return overlay(made, read(given), given)


def _load(spec: str | os.PathLike[str]) -> Topology:
    text = os.fspath(spec)
    if not isinstance(text, str):
        raise TopologyError(f"a topology is named by text or a path, not {spec!r}")
    text = text.removeprefix("\ufeff")
    if text == "auto":
        return detect()
    if not _is_text(text):
        if found := machine(text):
            return found
        if os.path.isfile(text):
            return _parse(read(text), text, Path(text).stem)
        if looks_like_cluster(text):
            return parse_cluster(text, _one_machine)
    elif made := _parse_known(text, "", None):
        return made
    raise TopologyError(
        f"unknown machine {_short(text)!r}: {'a folder, no' if _is_folder(text) else 'no such'} "
        "file, and no such name; names are "
        f"{', '.join(NAMES)}, N x NAME"
    )


def _is_folder(text: str) -> bool:
    return not _is_text(text) and os.path.isdir(text)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


def _is_text(text: str) -> bool:
    """Whether this can only be a file's content."""
    return "\n" in text or text.lstrip().startswith(("{", "<"))


def _parse(text: str, path: str, name: str) -> Topology:
    made = _parse_known(text, path, name)
    if made is None:
        raise TopologyError(
            f"{path}: neither the output of nvidia-smi topo -m, nor an NCCL topology, nor "
            'linkweave\'s JSON, nor "N x machine"'
        )
    return made


def _parse_known(text: str, path: str, name: str | None) -> Topology | None:
    """The machine in a text, None if it is none; named after its file."""
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return Topology.from_json(start, where=path or "topology JSON")
    if start.startswith("<"):
        made = parse_nccl_xml(start, path or "NCCL topology")
        return made if name is None else replace(made, name=name)
    if _NCCL_TESTS.search(text):
        raise TopologyError(
            f"{path or 'this text'} is a benchmark's log (nccl-tests), not a topology"
        )
    if looks_like_p2p(text):
        raise TopologyError(
            f"{path or 'this text'} is measured figures (p2pBandwidthLatencyTest), which say "
            "nothing of the wiring: give them beside a topology, as `measured`"
        )
    if looks_like_smi(text):
        made = parse_smi(text, path or "nvidia-smi")
        return made if name is None else replace(made, name=name)
    if looks_like_cluster(text):
        return parse_cluster(text, _one_machine, f"{path}: " if path else "", name)
    return None


def _one_machine(spec: str) -> Topology:
    """A node of a cluster, which is no cluster itself: a file could name itself."""
    if os.path.isfile(spec) and looks_like_cluster(read(spec)):
        raise TopologyError(f"{spec}: a cluster cannot be the node of a cluster")
    return _load(spec)


def read(path: str) -> str:
    """A text file, in UTF-8 or what Windows writes. Raises TopologyError for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise TopologyError(f"{path}: {error.strerror}") from None
    if len(data) > LARGEST:
        raise TopologyError(f"{path}: larger than {LARGEST >> 20} MiB")
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: not a text file") from None
