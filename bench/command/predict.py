"""`linkweave predict`: training steps on a machine, from its links and its GPUs' speed."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from linkweave.bench.command import options
from linkweave.bench.command import schedule as schedules
from linkweave.bench.command.plans import one_of
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Network, Profile, Schedule
from linkweave.collectives.overlap.profile import sample_of
from linkweave.topology import Topology
from linkweave.topology.checks import integer, number
from linkweave.topology.machines import CLOUD, NAMES
from linkweave.topology.speeds import compute_capability
from linkweave.topology.text import assumed, ranks

PEAKS = {
    60: (10.6, "P100", "FP32"), 70: (15.7, "V100", "FP32"), 80: (156.0, "A100", "TF32"),
    90: (494.7, "H100", "TF32"), 100: (1125.0, "B200", "TF32"),
}  # fmt: skip
"""TFLOP/s of dense matrices in training precision, by compute capability: NVIDIA's data sheets."""
MODELS = "P100", "V100", "A100", "H100", "H200", "B200", "B300"  # that have one of these
REACHED = 0.4
"""The share of the peak that training is taken to reach. One V100 trained ResNet-50 in FP32 at
253.1 images/s (batch 64; HKBU-HPML/ddl-benchmarks, 2020-05-29), which is 6.2 TFLOP/s, 0.40 of its
peak; BERT-base at 212.8 sequences/s, 0.57."""
BATCH = 64
POLICIES = ("ddp", "mg-wfbp", "us-byte", "c-cube")
"""Where steps of few policies are told: PyTorch's, and one of each kind."""


@dataclass(frozen=True)
class Work:
    """What one GPU computes in a step: its profile, and how its times were found. `batch` is the
    number of samples; None for a measured profile."""

    profile: Profile
    words: str
    batch: int | None


def work_of(
    spec: str, machine: Topology, batch: int | None = None, tflops: float | None = None
) -> Work:
    """A model of `overlap.models` on the machine's GPUs, or a measured profile from a file.

    `tflops` is the speed that training reaches on one GPU, in TFLOP/s; by default REACHED of the
    peak. Raises CollectiveError where neither is known.
    """
    if os.path.isfile(spec) or spec not in overlap.models():
        profile = overlap.load(spec)
        if batch is not None or tflops is not None:
            raise CollectiveError(f"{spec} has measured times: leave out --batch and --tflops")
        return Work(profile, "", None)
    batch = BATCH if batch is None else integer(batch, "--batch", 1)
    if tflops is not None:
        number(tflops, "--tflops", 1e-3, 1e6)
        words = f"computed at {tflops:g} TFLOP/s"
    else:
        tflops, words = _reached(machine)
    profile = overlap.model_at(spec, batch, tflops * 1e12)
    words = f"samples of {sample_of(spec)}, {words}"
    return Work(replace(profile, name=f"{spec}, batch {batch}"), words, batch)


def _reached(machine: Topology) -> tuple[float, str]:
    found = {device.sm for device in machine.devices if device.sm} or {_by_name(machine.name)}
    if len(found) > 1 or not (peak := PEAKS.get(next(iter(found)))):
        known = machine.on_memory or any(found) or any(name in machine.name for name in NAMES)
        named = "" if known else ", or --gpu, their model"
        raise CollectiveError(
            f"how fast the {machine.noun}s of {machine.name} compute is not known, only of "
            f"{', '.join(MODELS)}: give --tflops, what training reaches on one of them{named}"
        )
    tflops = REACHED * peak[0]
    return tflops, (
        f"computed at {tflops:.3g} TFLOP/s, {REACHED:.0%} of the {peak[1]}'s {peak[0]:g} in "
        f"{peak[2]} (assumed; --tflops sets it)"
    )


def _by_name(name: str) -> int:
    like = next((like for cloud, (like, _) in CLOUD.items() if cloud in name.lower()), name)
    return 70 if "dgx2" in like else compute_capability(like)


def network_of(machine: Topology, algorithm: str = "auto") -> Network:
    with options.console.status(f"planning all-reduces on {machine.name}"):
        return Network.from_topology(machine, algorithm)


def ranks_of(machine: Topology, ranks: int | None) -> Topology:
    """The machine with only its first GPUs. Raises CollectiveError if it has fewer."""
    if ranks is None:
        return machine
    return machine.subset(machine.gpus[: integer(ranks, "--ranks", 1, len(machine.gpus))])


def predict(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A file with a profile, or one of "
                       f"{', '.join(overlap.models())}."),
    ],
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
    ranks: Annotated[int | None, typer.Option(help="Use only the first GPUs.")] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"Samples on each GPU; by default {BATCH}.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="TFLOP/s that training reaches on one GPU; by default "
                     f"{REACHED:.0%} of its peak."),
    ] = None,
    algorithm: options.AlgorithmOption = "auto",
    policy: Annotated[
        str, typer.Option(help=f"all, auto, or one of {', '.join(overlap.POLICIES)}.")
    ] = "all",
    png: Annotated[Path | None, typer.Option(help="Draw a Gantt chart to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (one policy).")] = None,
    as_json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Predict a model's training steps on a machine, by each policy."""
    schedules.check(policy, png, trace, False, as_json)
    if machine in overlap.models() and model not in overlap.models():
        raise CollectiveError(f"the model comes first: predict {machine} {model}")
    found = ranks_of(options.machine_of(one_of(machine, topo), gpus, measured, gpu), ranks)
    work, network = work_of(model, found, batch, tflops), network_of(found, algorithm)
    steps = schedules.planned(work.profile, network, policy)
    whole = network.seconds(work.profile.nbytes)
    words = [textwrap.fill(work.words, options.WIDTH)]
    if whole:
        words.append(
            f"an all-reduce of all {work.profile.nbytes / 1e6:.1f} MB takes {whole * 1e3:.2f} ms, "
            f"{work.profile.nbytes / whole / 1e9:.1f} GB/s"
        )
    words += [speed(steps, work, found), *assumed(found)]
    schedules.tell(
        steps, "\n".join(filter(None, words)), png=png, trace=trace, as_json=as_json,
        batch=work.batch, all_reduce_seconds=whole,
    )  # fmt: skip


def speed(found: Sequence[Schedule], work: Work, machine: Topology) -> str:
    """The best policy's samples per second and efficiency on the machine, in words; empty without a
    batch."""
    best = min(found, key=lambda s: s.predicted_seconds)
    if work.batch is None or not best.predicted_seconds:
        return ""
    n = len(machine.gpus)
    pace = n * work.batch / best.predicted_seconds
    return (
        f"{ranks(machine)} train{'s'[: n == 1]} {pace:,.0f} samples/s with {best.policy}, "
        f"{schedules.efficiency(best):.1%} of {n} times one {machine.noun}"
    )
