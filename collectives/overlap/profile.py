"""Profiles of models: the layers, the bytes of their gradients, and their computation times."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.topology.checks import integer, number, parse_json, shown
from linkweave.topology.text import counted

MAX_LAYERS = 5000
MAX_BYTES = 1 << 40
"""The largest gradient."""
MAX_NUMBER = 1e9
"""The largest number of seconds, seconds per byte or workers, so that products stay finite."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One gradient tensor, and the seconds of its forward and backward pass on one worker.

    Layers without a gradient are left out; their times belong to a neighbour. Raises
    CollectiveError for numbers out of range.
    """

    name: str
    nbytes: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        where = f"layer {shown(self.name)}"
        nbytes = integer(self.nbytes, f"{where}: nbytes", 1, MAX_BYTES)
        object.__setattr__(self, "nbytes", nbytes)
        for field in ("forward_s", "backward_s"):
            number(getattr(self, field), f"{where}: {field}", 0, MAX_NUMBER)


@dataclass(frozen=True)
class Profile:
    """Up to MAX_LAYERS layers in forward order; `synthetic` if the times were not measured.

    Raises CollectiveError for no layers, or too many.
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
        """When each layer's gradient is ready, in seconds from the start of the backward pass."""
        upto = list(accumulate(layer.backward_s for layer in reversed(self.layers)))
        return tuple(reversed(upto))

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """The forward seconds from the start of each layer to the end of the pass."""
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

    def __repr__(self) -> str:
        return f"<Profile {self}>"

    def __str__(self) -> str:
        made, one = (", synthetic times", "tensor") if self.synthetic else ("", "layer")
        return (
            f"{self.name}: {counted(len(self.layers), one)}, {self.nbytes / 1e6:.1f} MB, forward "
            f"{self.forward_s * 1e3:.1f} ms, backward {self.backward_s * 1e3:.1f} ms{made}"
        )

    def to_data(self) -> dict[str, Any]:
        """The profile as JSON has it."""
        layers = [asdict(layer) for layer in self.layers]
        return {"name": self.name, "synthetic": self.synthetic, "layers": layers}

    def to_json(self) -> str:
        return json.dumps(self.to_data())

    @staticmethod
    def from_json(text: str) -> Profile:
        """Return the profile that `to_json` wrote. Raises CollectiveError."""
        return Profile.from_data(parse_json(text, "profile JSON", CollectiveError))

    @staticmethod
    def from_data(data: Any) -> Profile:
        """Return the profile that `to_data` gave. Raises CollectiveError."""
        rows = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise CollectiveError("profile JSON must be an object with a list of layers")
        synthetic = data.get("synthetic", False)
        if not isinstance(synthetic, bool):
            raise CollectiveError(f"synthetic must be true or false, not {shown(synthetic)}")
        name = data.get("name", "profile")
        if not isinstance(name, str):
            raise CollectiveError(f"name must be a string, not {shown(name)}")
        return Profile(_layers(rows), name, synthetic)

    @staticmethod
    def from_csv(text: str, name: str = "profile") -> Profile:
        """Read rows of name, nbytes, forward_s, backward_s after a header. Raises
        CollectiveError."""
        try:
            rows = csv.DictReader(io.StringIO(text, newline=None))
            if not {*_FIELDS} & {*(rows.fieldnames or ())}:
                raise CollectiveError(f"a profile in CSV begins with {','.join(_FIELDS)}")
            return Profile(_layers(rows), name)
        except csv.Error as error:
            raise CollectiveError(f"a profile in CSV is needed: {error}") from None


_FIELDS = ("name", "nbytes", "forward_s", "backward_s")


def _layers(rows: Iterable[Any]) -> tuple[Layer, ...]:
    """Read at most one layer more than a profile may have, which then refuses them."""
    return tuple(_layer(i, row) for i, row in enumerate(islice(rows, MAX_LAYERS + 1)))


def _layer(index: int, row: Any) -> Layer:
    if not isinstance(row, dict):
        raise CollectiveError(f"layer {index} must have {', '.join(_FIELDS)}, not {shown(row)}")
    for field in _FIELDS:
        if row.get(field) in (None, ""):
            raise CollectiveError(f"layer {index} has no {field}")
    if unknown := [field for field in row if field not in _FIELDS]:
        raise CollectiveError(
            f"layer {index}: unknown field {shown(unknown[0])}; fields are {', '.join(_FIELDS)}"
        )
    values = {field: row[field] for field in _FIELDS}
    for field, kind in (("nbytes", int), ("forward_s", float), ("backward_s", float)):
        if isinstance(values[field], str):  # from CSV
            try:
                values[field] = kind(values[field])
            except ValueError:
                raise CollectiveError(
                    f"layer {index}: {field} must be a number, not {shown(values[field])}"
                ) from None
    if not isinstance(values["name"], str):
        raise CollectiveError(f"layer {index}: name must be a string, not {shown(values['name'])}")
    return Layer(**values)


FORWARD_S = {
    "vgg16": 0.1776, "resnet50": 0.0825, "resnet152": 0.091, "densenet201": 0.4915,
    "googlenet": 0.0184, "mobilenetv2": 0.1042,
}  # fmt: skip
"""Measured seconds of a forward pass: ResNet-152 on an RTX 2080 Ti, batch 32 (ASC-WFBP, section
VI-E, with a backward pass twice as long); the others on a V100 (US-Byte's sources)."""
ASSUMED_S = 0.08
"""Seconds of a forward pass for models without a published measurement."""


@cache
def _models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        files("linkweave.collectives.overlap").joinpath("models.json").read_text()
    )
    return found


def models() -> tuple[str, ...]:
    """Return the names of the models that `model` knows."""
    return tuple(_models())


def model(name: str, forward_s: float | None = None, backward_s: float | None = None) -> Profile:
    """Return a published model with float32 gradients and synthetic times.

    The total of the forward pass is `forward_s`, by default a published measurement (`FORWARD_S`).
    The total of the backward pass is by default twice that, as it computes two products of the size
    of the forward pass, for the gradients of the input and of the parameters. Tensors share the
    totals in proportion to their forward FLOPs on one sample (`models.json`, for the shape `input`,
    by `tests/data/make_flops.py`), as no public source has times of single layers. Raises
    CollectiveError.
    """
    if name not in _models():
        raise _unknown(f"unknown model {shown(name)}", name)
    forward = FORWARD_S.get(name, ASSUMED_S) if forward_s is None else forward_s
    backward = 2 * forward if backward_s is None else backward_s
    number(forward, "forward_s", 0, MAX_NUMBER)
    number(backward, "backward_s", 0, MAX_NUMBER)
    known = _models()[name]
    total = sum(known["flops"])
    return Profile(
        tuple(
            Layer(tensor, 4 * n, forward * flops / total, backward * flops / total)
            for tensor, n, flops in zip(known["names"], known["numel"], known["flops"], strict=True)
        ),
        name,
        True,
    )


def sample_of(name: str) -> str:
    """What one sample of a published model is: the shape of an image, or a number of tokens."""
    return str(_models()[name]["input"])


def model_at(name: str, batch: int, flops_per_s: float) -> Profile:
    """Return a published model whose forward pass computes `batch` samples at `flops_per_s`, and
    whose backward pass takes twice as long (`model`), of samples as `sample_of` says. Raises
    CollectiveError."""
    model(name)  # refuses an unknown name
    batch = integer(batch, "batch", 1, int(MAX_NUMBER))
    number(flops_per_s, "flops_per_s", 1, 1e18)
    return model(name, batch * sum(_models()[name]["flops"]) / flops_per_s)


def _unknown(words: str, name: str) -> CollectiveError:
    near = get_close_matches(str(name), _models(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return CollectiveError(f"{words}; {hint}models: {', '.join(_models())}")


def load(spec: str) -> Profile:
    """Return the profile of a known model, or read one from a JSON or CSV file. Raises
    CollectiveError."""
    if spec in _models():
        return model(spec)
    path = Path(spec)
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise CollectiveError(f"{shown(spec)} is not a text file") from None
    except (OSError, ValueError):
        raise _unknown(f"{shown(spec)} is neither a file nor a model", spec) from None
    try:
        if text.lstrip().startswith(("{", "[")):
            return Profile.from_json(text)
        return Profile.from_csv(text, path.stem)
    except CollectiveError as error:
        raise CollectiveError(f"{spec}: {error}") from None
