"""Networks as users give them: a preset's name, start-up and time per byte, or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import PRESETS, Network, network
from linkweave.collectives.overlap.timing import timings_of
from linkweave.topology.checks import shown
from linkweave.topology.json_reader import parse_json

_EXPONENTS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_FIELDS = (  # of JSON
    "startup_s", "seconds_per_byte", "gamma", "workers", "name", "timings", "overhead_s"
)  # fmt: skip


def network_from(spec: str, workers: int | None = None) -> Network:
    """Return the network that `spec` describes, for so many workers.

    It is a preset's name; "a=2ms,b=1.1ns" with the start-up a and the time per byte b (in s, ms, us
    or ns), and optionally gamma and workers; or a JSON file, either of a Network's own fields or of
    `linkweave bench network`, whose workers are machines. If `spec` says for how many workers its
    times are, `Network.at` scales them to `workers`; otherwise they are taken to be for `workers`
    (2 by default). Raises CollectiveError.
    """
    if spec in PRESETS:
        return network(spec, workers)
    if os.path.isfile(spec):
        fields = _read(Path(spec))
    elif "=" in spec:
        fields = _parse(spec)
    else:
        raise CollectiveError(
            f"network {shown(spec)} is neither a file nor a preset; presets are "
            f"{', '.join(PRESETS)}; or give the start-up and the time per byte, as a=2ms,b=1.1ns"
        )
    if workers is None:
        return Network(**fields)
    return Network(**{"workers": workers, **fields}).at(workers)


def _read(path: Path) -> dict[str, Any]:
    where = f"network {shown(str(path))}"
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise CollectiveError(f"{where} is not a text file") from None
    data = parse_json(text, where, CollectiveError)
    if isinstance(data, dict) and "network" in data:  # a ClusterMap's
        data = data["network"]
    if not isinstance(data, dict):
        raise CollectiveError(
            f"{where}: needs an object of {', '.join(_FIELDS)}, not {shown(data)}"
        )
    if unknown := [field for field in data if field not in _FIELDS]:
        raise CollectiveError(
            f"{where}: unknown field {shown(unknown[0])}; fields are {', '.join(_FIELDS)}"
        )
    for field in ("startup_s", "seconds_per_byte"):
        if field not in data:
            raise CollectiveError(f"{where} has no {field}")
    timings = timings_of(data.get("timings", []), where)
    return {"name": path.stem, **data, "timings": timings}


def _parse(spec: str) -> dict[str, Any]:
    """Read "a=2ms,b=1.1ns,gamma=1.5,workers=8"."""
    where = f"network {shown(spec)}"
    known: dict[str, tuple[str, Callable[[str], float], str]] = {
        "a": ("startup_s", _seconds, "a time such as 2ms, in s, ms, us or ns"),
        "b": ("seconds_per_byte", _seconds, "a time per byte such as 1.1ns, in s, ms, us or ns"),
        "gamma": ("gamma", float, "a number"),
        "workers": ("workers", int, "an integer"),
    }
    found: dict[str, Any] = {"name": spec}
    for part in spec.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in known:
            raise CollectiveError(f"{where}: unknown {shown(key)}; known are {', '.join(known)}")
        field, read, what = known[key]
        if field in found:
            raise CollectiveError(f"{where}: {key} is given twice")
        try:
            found[field] = read(value)
        except ValueError:
            raise CollectiveError(f"{where}: {key} must be {what}, not {shown(value)}") from None
    for key in ("a", "b"):
        if known[key][0] not in found:
            raise CollectiveError(f"{where} has no {key}; it is like a=2ms,b=1.1ns")
    return found


def _seconds(text: str) -> float:
    number = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([mun]?s)", text, re.ASCII)
    if number is None:
        raise ValueError(text)
    return float(f"{number[1]}e{_EXPONENTS[number[2]]}")
