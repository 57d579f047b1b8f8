"""`topology.load`: a topology from a name, a file, a text or this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shlex import quote

from linkweave.topology.checks import TopologyError
from linkweave.topology.clusters import looks_like_cluster, parse_cluster
from linkweave.topology.machines import CLOUD, NAMES, machine, of_cards
from linkweave.topology.readers.detect import detect
from linkweave.topology.readers.measured import looks_like_p2p, overlay
from linkweave.topology.readers.nccl_xml import parse_nccl_xml
from linkweave.topology.readers.parse_smi import looks_like_smi, parse_smi
from linkweave.topology.speeds import capability_of_model, known_model
from linkweave.topology.topology import Topology

LARGEST = 32 << 20  # bytes of a file
_OF_CARDS = "pcie-", "mesh-", "ring-"  # machines of GPUs whose model is not known
_NCCL_TESTS = re.compile(r"\balgbw\s+busbw\b")


def load(
    spec: str | os.PathLike[str] | Topology, measured: str | os.PathLike[str] | None = None,
    gpu: str | None = None,
) -> Topology:  # fmt: skip
    """Return the topology that `spec` describes; a Topology is returned as it is.

    `spec` is a machine's name (`topology.NAMES`); a cluster such as "16 x dgx-a100 nics=rail" (see
    `topology.clusters`); "auto" for the GPUs of this machine or, without any, one rank for each of
    its CPU cores; or a file, by its path or its text. Files are what `nvidia-smi topo -m` printed,
    an NCCL topology (XML), JSON of `Topology.to_json`, or a cluster's description.

    `measured` is the path or text of figures that replace nominal ones: what `linkweave bench
    links` or `bench algorithms` wrote or p2pBandwidthLatencyTest printed. `gpu` is the model, such
    as "b300", of GPUs that the text, or "pcie-8", "mesh-8" or "ring-8", does not name. Raises
    TopologyError that says what is wrong.
    """
    made = spec if isinstance(spec, Topology) else _load(spec, gpu or "")
    if gpu and not any(device.sm == known_model(gpu) for device in made.devices):
        raise TopologyError(
            f"{gpu} cannot be the model of the GPUs of {made.name}: it is for pcie-N, mesh-N, "
            "ring-N, files that do not tell it, and clusters of these"
        )
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


def _load(spec: str | os.PathLike[str], gpu: str) -> Topology:
    text = os.fspath(spec) if isinstance(spec, str | os.PathLike) else spec
    if not isinstance(text, str):
        raise TopologyError(f"a topology is named by text or a path, not {spec!r}")
    text = text.removeprefix("\ufeff")
    if text == "auto":
        return detect()
    if not _is_text(text):
        if found := machine(text):
            return of_cards(found, gpu) if gpu and text.startswith(_OF_CARDS) else found
        if os.path.isfile(text):
            return _parse(read(text), text, Path(text).stem, gpu)
        cards = capability_of_model(text.partition(" x ")[2])  # not a cluster, whatever is meant
        if looks_like_cluster(text) and not cards:
            return parse_cluster(text, partial(_one_machine, gpu=gpu))
    elif made := _parse_known(text, "", None, gpu):
        return made
    hint = "" if _is_text(text) or not (near := _near(text)) else f"did you mean {near}? "
    folder = not _is_text(text) and os.path.isdir(text)
    raise TopologyError(
        f"unknown machine {text[:200] + '...' * (len(text) > 200)!r}: "
        f"{'a folder, no' if folder else 'no such'} "
        f"file, and no such name; {hint}names are auto, {', '.join(NAMES)}, N x NAME, and types of "
        "cloud machines such as p5.48xlarge"
    )


_CARDS = 75, 86, 89, 120
"""Compute capabilities of GPUs that are cards: others are joined by NVLinks, in machines here."""


def _near(text: str) -> str:
    """Which machine may be meant by a text that names none; empty if none is like it."""
    lower = text.lower().strip()
    if machine(lower):
        return lower
    if (turned := re.fullmatch(r"(\S+) ?x ?(\d+)", lower)) and machine(turned[1]):
        return f"{turned[2]} x {turned[1]}"
    if counted := re.fullmatch(r"(\d+) ?(?:x|nodes of)? ?([a-z]\S*(?: [^/]*)?)", lower):
        count, lower = counted.groups()
        if machine(lower):
            return f"{count} x {lower}"
    else:
        count = "8"
    plain = _letters(lower)
    for names in (NAMES, tuple(CLOUD)):
        if near := [name for name in names if len(plain) > 1 and _letters(name).startswith(plain)]:
            return " or ".join(near)
        if near := [name for name in names if len(plain) > 3 and _letters(name).endswith(plain)]:
            return " or ".join(near)
    for name in get_close_matches(lower, [*NAMES, *CLOUD], 1):
        if name.partition(".")[0] == lower.partition(".")[0] or "." not in name:
            return name  # g5.48xlarge is not like p5.48xlarge
    if capability_of_model(lower) in _CARDS and not Path(lower).suffix:
        return f"pcie-{count} --gpu {quote(lower)}"
    return ""


def _letters(name: str) -> str:
    return re.sub(r"[ _-]", "", name)


def _is_text(text: str) -> bool:
    return "\n" in text or text.lstrip().startswith(("{", "<"))


def _parse(text: str, path: str, name: str, gpu: str) -> Topology:
    made = _parse_known(text, path, name, gpu)
    if made is None:
        raise TopologyError(
            f"{path}: neither the output of nvidia-smi topo -m, nor an NCCL topology, nor "
            'linkweave\'s JSON, nor "N x machine"'
        )
    return made


def _parse_known(text: str, path: str, name: str | None, gpu: str) -> Topology | None:
    """The machine in a text, named after its file; None if the text is of no known kind."""
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return Topology.from_json(start, where=path or "topology JSON")
    if start.startswith("<"):
        made = parse_nccl_xml(start, path or "NCCL topology", gpu)
        return made if name is None else replace(made, name=name)
    if _NCCL_TESTS.search(text):
        raise TopologyError(
            f"{path or 'this text'} is a benchmark's log (nccl-tests), not a topology"
        )
    if looks_like_p2p(text):
        raise TopologyError(
            f"{path or 'this text'} is measured figures (p2pBandwidthLatencyTest), which say "
            "nothing of the wiring: give them beside a topology: --measured FILE, or "
            "load(..., measured=FILE)"
        )
    if looks_like_smi(text):
        made = parse_smi(text, path or "nvidia-smi", gpu)
        return made if name is None else replace(made, name=name)
    if looks_like_cluster(text):
        node = partial(_one_machine, gpu=gpu)
        return parse_cluster(text, node, f"{path}: " if path else "", name)
    return None


def _one_machine(spec: str, gpu: str) -> Topology:
    """Load the node of a cluster. It must not be a cluster itself: a file could name itself."""
    if os.path.isfile(spec) and looks_like_cluster(read(spec)):
        raise TopologyError(f"{spec}: a cluster cannot be the node of a cluster")
    return load(spec, gpu=gpu)


def read(path: str) -> str:
    """Read a text file in UTF-8 or UTF-16. Raises TopologyError for anything else."""
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
