"""What a model's iteration is made of: its layers, their gradients' bytes and their times."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from linkweave.collectives.errors import CollectiveError

MAX_LAYERS = 5000
MAX_BYTES = 1 << 40
"""Of one gradient."""
MAX_NUMBER = 1e9
"""The largest number of seconds, seconds per byte or workers: sums and products stay finite."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One gradient tensor of 1 to MAX_BYTES bytes; times in seconds of one iteration on one worker.

    What has no gradient is left out, its times added to a neighbour's. Raises CollectiveError.
    """

    name: str
    nbytes: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        where = f"layer {shown(self.name)}"
        check_count(f"{where}: nbytes", self.nbytes, MAX_BYTES)
        for field in ("forward_s", "backward_s"):
            check_number(f"{where}: {field}", getattr(self, field))


@dataclass(frozen=True)
class Profile:
    """1 to MAX_LAYERS layers in forward order. `synthetic`: the times are not measured.

    Raises CollectiveError.
    """

    layers: tuple[Layer, ...]
    name: str = "profile"
    synthetic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise CollectiveError(f"profile {shown(self.name)} has no layers; at least 1 is needed")
        if len(self.layers) > MAX_LAYERS:
            raise CollectiveError(
                f"profile {shown(self.name)} has more than {MAX_LAYERS} layers, which is the most"
            )

    @cached_property
    def ready(self) -> tuple[float, ...]:
        """When each layer's gradient is there, in seconds from the start of the backward pass."""
        upto = list(accumulate(layer.backward_s for layer in reversed(self.layers)))
        return tuple(reversed(upto))

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """The forward time from each layer's start to the end."""
        after = list(accumulate(layer.forward_s for layer in reversed(self.layers)))
        return tuple(reversed(after))

    @property
    def backward_s(self) -> float:
        return self.ready[0]

    @property
    def forward_s(self) -> float:
        return self.tails[0]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def __str__(self) -> str:
        made = ", synthetic times" if self.synthetic else ""
        return (
            f"{self.name}: {len(self.layers)} tensors, {self.nbytes / 1e6:.1f} MB, forward "
            f"{self.forward_s * 1e3:.1f} ms, backward {self.backward_s * 1e3:.1f} ms{made}"
        )

    def to_json(self) -> str:
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"name": self.name, "synthetic": self.synthetic, "layers": layers})

    @staticmethod
    def from_json(text: str) -> Profile:
        """What `to_json` wrote. Raises CollectiveError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CollectiveError(f"a profile in JSON is needed: {error}") from None
        rows = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise CollectiveError("a profile in JSON is an object with a list of layers")
        synthetic = data.get("synthetic", False)
        if not isinstance(synthetic, bool):
            raise CollectiveError(f"synthetic must be true or false, not {shown(synthetic)}")
        name = data.get("name", "profile")
        if not isinstance(name, str):
            raise CollectiveError(f"name must be a string, not {shown(name)}")
        return Profile(_layers(rows), name, synthetic)

    @staticmethod
    def from_csv(text: str, name: str = "profile") -> Profile:
        """Rows of name, nbytes, forward_s, backward_s under a header. Raises CollectiveError."""
        try:
            return Profile(_layers(csv.DictReader(io.StringIO(text, newline=None))), name)
        except csv.Error as error:
            raise CollectiveError(f"a profile in CSV is needed: {error}") from None


_FIELDS = ("name", "nbytes", "forward_s", "backward_s")


def _layers(rows: Iterable[Any]) -> tuple[Layer, ...]:
    """As many as a profile may have and one more, which it refuses."""
    return tuple(_layer(i, row) for i, row in enumerate(islice(rows, MAX_LAYERS + 1)))


def _layer(place: int, row: Any) -> Layer:
    if not isinstance(row, dict):
        raise CollectiveError(f"layer {place} must have {', '.join(_FIELDS)}, not {shown(row)}")
    for field in _FIELDS:
        if row.get(field) in (None, ""):
            raise CollectiveError(f"layer {place} has no {field}")
    if unknown := [field for field in row if field not in _FIELDS]:
        raise CollectiveError(
            f"layer {place}: unknown field {shown(unknown[0])}; fields are {', '.join(_FIELDS)}"
        )
    values = {field: row[field] for field in _FIELDS}
    for field, kind in (("nbytes", int), ("forward_s", float), ("backward_s", float)):
        if isinstance(values[field], str):  # of a CSV
            try:
                values[field] = kind(values[field])
            except ValueError:
                raise CollectiveError(
                    f"layer {place}: {field} must be a number, not {shown(values[field])}"
                ) from None
    if not isinstance(values["name"], str):
        raise CollectiveError(f"layer {place}: name must be a string, not {shown(values['name'])}")
    return Layer(**values)


def check_number(what: str, value: Any, least: float = 0.0) -> None:
    """Raise CollectiveError unless it is a number from `least` to MAX_NUMBER."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value >= least:
        raise CollectiveError(f"{what} must be a number of at least {least:g}, not {shown(value)}")
    if value > MAX_NUMBER:
        raise CollectiveError(f"{what} must be at most {MAX_NUMBER:g}, not {shown(value)}")


def check_count(what: str, value: object, most: int) -> int:
    """The value. Raises CollectiveError unless it is an integer from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CollectiveError(f"{what} must be an integer of at least 1, not {shown(value)}")
    if value > most:
        raise CollectiveError(f"{what} must be at most {most}, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A short repr, of whatever was given."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits or levels than Python prints
        return "a value too large to be printed"
    return text if len(text) <= 80 else text[:77] + "..."


FORWARD_S = {
    "vgg16": 0.1776, "resnet50": 0.0825, "resnet152": 0.091, "densenet201": 0.4915,
    "googlenet": 0.0184, "mobilenetv2": 0.1042,
}  # fmt: skip
"""Forward seconds that were measured: ResNet-152 on an RTX 2080 Ti, batch 32 (ASC-WFBP paper,
section VI-E, with a backward pass twice as long); the others on a V100 (US-Byte's sources)."""
ASSUMED_S = 0.08
"""Of models for which no measurement is public."""


@cache
def _models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        files("linkweave.collectives.overlap").joinpath("models.json").read_text()
    )
    return found


def models() -> tuple[str, ...]:
    """Names of the models whose gradients' sizes are known."""
    return tuple(_models())


def model(name: str, forward_s: float | None = None, backward_s: float | None = None) -> Profile:
    """A published model with float32 gradients and synthetic times.

    The forward total is measured where one is public (`FORWARD_S`), the backward total twice that:
    a layer's backward pass makes two products as large as its forward pass's, one for its input and
    one for its parameters. Both are shared out in proportion to each tensor's forward FLOPs on one
    sample (`models.json`: at the shape `input`, by `bench/flops.py`). No public source has measured
    times of single layers. Raises CollectiveError.
    """
    if name not in _models():
        raise CollectiveError(f"unknown model {shown(name)}; choose from {', '.join(_models())}")
    forward = FORWARD_S.get(name, ASSUMED_S) if forward_s is None else forward_s
    backward = 2 * forward if backward_s is None else backward_s
    check_number("forward_s", forward)
    check_number("backward_s", backward)
    known = _models()[name]
    total = sum(known["flops"])
    return Profile(
        tuple(
            Layer(tensor, 4 * n, forward * flops / total, backward * flops / total)
            for tensor, n, flops in zip(
                known["names"], known["numel"], known["flops"], strict=True
            )
        ),
        name, True,
    )  # fmt: skip


def load(spec: str) -> Profile:
    """A model's name, or a file of JSON or CSV. Raises CollectiveError."""
    if spec in _models():
        return model(spec)
    path = Path(spec)
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise CollectiveError(f"{shown(spec)} is not a text file") from None
    except (OSError, ValueError):
        raise CollectiveError(
            f"{shown(spec)} is neither a file nor a model; models: {', '.join(_models())}"
        ) from None
    if text.lstrip().startswith(("{", "[")):
        return Profile.from_json(text)
    return Profile.from_csv(text, path.stem)
