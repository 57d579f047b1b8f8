"""The US-Byte paper's tables and figures beside predicted steps and throttled lanes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from linkweave.bench.reproduce.measured import Recorded, here, measured, recorded
from linkweave.bench.reproduce.predictions import LANES, errors, pairs
from linkweave.bench.reproduce.rows import (
    CORE,
    CPU_RANKS,
    DESIGN,
    SIMULATED,
    Part,
    Plot,
    Row,
    Series,
)
from linkweave.collectives import overlap
from linkweave.collectives.overlap import Network, Profile, Schedule
from linkweave.collectives.overlap.policies.us_byte import PARTITION

# The b printed for cluster 1, 0.0352 ns/B, would be 28 GB/s on 10GbE; a ring's is taken.
CLUSTER1 = Network(910.5e-6, 2 * 7 / 8 / 1.25e9, 2.0, 8, "10GbE of US-Byte")
CLUSTER2 = Network(1318.6e-6, 2.406e-10, 2.0, 8, "100 Gbit/s of US-Byte")
MODELS = ("googlenet", "resnet50", "vgg16-cifar", "mobilenetv2", "bert-base")
FORWARD_S = {"vgg16-cifar": 0.1776}
"""The measured total that the paper's program has for VGG-16."""
ORDERS = 1000
SIZES = tuple(n * 100_000 // 8 // 16 * 16 for n in (1, 5, 10, 40, 80))
"""Bytes of basic blocks: 0.1 to 8 Mb."""
STEPS = LANES[:3]
FROM_A_RING = (
    "the printed b is 40 times too small for 10GbE: a ring's is taken; forward totals are V100 "
    "measurements, divided by FLOPs"
)
NOTES = (
    "figures 1 to 8 and 19 are drawings, tables 1 and 2 name symbols and hardware",
    "layer times are synthetic; Inception-v3's layers are not published",
)


def profile_of(model: str) -> Profile:
    """The model with a measured total, divided by FLOPs."""
    return overlap.model(model, FORWARD_S.get(model))


def _seconds(profile: Profile, network: Network, policy: str, **options: int) -> float:
    return overlap.plan(profile, network, policy, **options).predicted_seconds


def _gains(network: Network, **options: int) -> tuple[list[float], list[float]]:
    """In %, over ByteScheduler with a credit of 1 and over WFBP, for each model."""
    profiles = [profile_of(model) for model in MODELS]
    mine = [_seconds(p, network, "us-byte") for p in profiles]
    others = [_seconds(p, network, "bytescheduler", credit=1, **options) for p in profiles]
    wfbp = [_seconds(p, network, "wfbp") for p in profiles]
    return tuple(
        [100 * (theirs / ours - 1) for theirs, ours in zip(found, mine, strict=True)]
        for found in (others, wfbp)
    )  # type: ignore[return-value]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f} %"


def speeds() -> Part:
    """Figures 10, 11, 14 and 18: workers and bandwidths."""
    rows, at = [], (2, 4, 8, 16, 32, 64, 128)
    why = {
        8: f"with a credit of 1; with 2, blocks hide each other's start-ups. {FROM_A_RING}",
        128: "does not follow from the paper's equations: US-Byte sends at least one all-reduce a "
        "tensor, as WFBP does, so that it gains at most the forward pass",
    }
    for workers, blocks, figure, theirs in (
        (8, {}, "figure 10", ("11 to 26 %", "21 to 56 %")),
        (128, {"partition": PARTITION}, "figure 18", ("28 to 69 %", "234 to 332 %")),
    ):
        for other, printed, found in zip(
            ("ByteScheduler", "WFBP"), theirs, _gains(CLUSTER1.at(workers), **blocks), strict=True
        ):
            rows.append(Row(figure, f"{workers} workers: US-Byte above {other}", printed,
                            _span(found), SIMULATED, reason=why[workers]))  # fmt: skip
    resnet = profile_of("resnet50")
    compute = resnet.forward_s + resnet.backward_s
    series = tuple(
        Series(name, at, tuple(n * compute / _seconds(resnet, CLUSTER1.at(n), name) for n in at))
        for name in ("us-byte", "bytescheduler", "wfbp")
    )
    vgg = profile_of("vgg16-cifar")
    exposed = [overlap.plan(vgg, CLUSTER1, name).timeline.exposed_s for name in ("us-byte", "wfbp")]
    rows.append(Row("figure 11", "VGG-16: US-Byte's exposed communication over WFBP's", "below 1",
                    exposed[0] / exposed[1], SIMULATED))  # fmt: skip
    for model, rate, theirs in (("vgg16-cifar", 20, 24.0), ("bert-base", 20, 21.0),
                                ("resnet50", 10, 20.0)):  # fmt: skip
        net = replace(CLUSTER2, seconds_per_byte=CLUSTER2.seconds_per_byte * 100 / rate)
        profile = profile_of(model)
        gain = _seconds(profile, net, "bytescheduler", credit=1) / _seconds(profile, net, "us-byte")
        rows.append(Row("figure 14", f"{model} at {rate} Gbit/s: US-Byte above ByteScheduler, up "
                        "to", theirs, 100 * (gain - 1), SIMULATED, "%",
                        "ours takes the best partition of a grid for ByteScheduler; forward times "
                        "are of a V100, the paper's of an RTX 3090"))  # fmt: skip
    plot = Plot("US-Byte, figure 18: ResNet-50", "Predicted speed-up over one V100, 10GbE.",
                "workers", "speed-up", series, log="xy")  # fmt: skip
    return Part(tuple(rows), (plot,), NOTES)


def orders() -> Part:
    """Figures 13, 15 and 16: the order of the second phase, and the size of basic blocks."""
    rows = []
    for model in ("resnet50", "vgg16-cifar"):
        made = overlap.plan(profile_of(model), CLUSTER1, "us-byte")
        rows.append(
            Row(
                "figure 13",
                f"{model}: random orders of the second phase that are slower",
                100.0,
                _slower(made),
                SIMULATED,
                "%",
                f"{ORDERS} orders; the paper tried 10,000. Others may be as fast",
            )
        )
    vgg, took, speed = profile_of("vgg16-cifar"), [], {"us-byte": [], "bytescheduler": []}
    for size in SIZES:
        start = time.perf_counter()
        for name, found in speed.items():
            extra = {} if name == "us-byte" else {"credit": 1}
            found.append(1 / _seconds(vgg, CLUSTER2, name, partition=size, **extra))
            if name == "us-byte":
                took.append(time.perf_counter() - start)
    rows += [
        Row("figure 15", "s to plan VGG-16", "at most 10", max(took),
            f"{CORE}, {here()}",
            reason="section 7.2 says less than 1 s for VGG-16"),
        Row("figure 16", "VGG-16: speed with blocks of 0.1 Mb over 8 Mb, US-Byte",
            "slightly slower", speed["us-byte"][0] / speed["us-byte"][-1], SIMULATED),
        Row("figure 16", "VGG-16: speed with blocks of 0.1 Mb over 8 Mb, ByteScheduler",
            "much slower", speed["bytescheduler"][0] / speed["bytescheduler"][-1], SIMULATED),
    ]  # fmt: skip
    plot = Plot("US-Byte, figure 16: VGG-16", "Predicted steps a second on 8 workers at 100 "
                "Gbit/s, by the size of a basic block.", "Mb", "steps/s",
                tuple(Series(name, tuple(8e-6 * n for n in SIZES), tuple(found))
                      for name, found in speed.items()), log="x")  # fmt: skip
    return Part(tuple(rows), (plot,))


def _slower(made: Schedule) -> float:
    """The share in % of random orders of what is sent after the backward pass that take longer."""
    first = sum(start < made.profile.backward_s for start, _ in made.timeline.sends)
    sends, rest = made.communications[:first], list(made.communications[first:])
    shuffle, slower = random.Random(0), 0
    for _ in range(ORDERS):
        shuffle.shuffle(rest)
        other = replace(made, communications=(*sends, *rest))
        slower += other.predicted_seconds > made.predicted_seconds * (1 + 1e-12)
    return 100 * slower / ORDERS


def measurements() -> Part:
    """Tables 3 to 5 and figures 9, 12 and 17."""
    rows = [
        measured("table 4", f"{name.split('-e')[0].removeprefix('steps-')}: error of a predicted "
                 "step of US-Byte", "at most 5 %", CPU_RANKS, name, _error, "%",
                 "layers that sleep, all-reduces of 2 ranks on throttled lanes")
        for name in STEPS
    ]  # fmt: skip
    every = [e for name in STEPS for e in errors(pairs(recorded(name)))]
    rows += [
        Row("table 4", "median error over all policies and three models", "at most 5 %",
            median(every), f"{CPU_RANKS}, {recorded(STEPS[0]).where}", "%"),
        Row("table 5", "time to partition tensors in a step", "0.2 to 1.8 %", 0.0, DESIGN,
            "%", "blocks are cut once, when a schedule is made: a step only follows the program"),
        Row("figure 9", "all-reduce is linear in its size", "yes", "yes",
            DESIGN, reason="the model has it so; ASC-WFBP, figure 4a, has measurements"),
        Row("figure 12", "epochs to a loss of 1.0 (ResNet-50) and 1.5 (VGG-16)", "45 and 55", None,
            reason="needs ImageNet, Cifar-100 and GPUs; schedules do not change what is computed"),
        Row("figure 17", "power of US-Byte against ByteScheduler", "less", None,
            reason="needs GPUs with power meters"),
    ]  # fmt: skip
    return Part(tuple(rows))


def _error(found: Recorded) -> float:
    row = found.row(policy="us-byte")
    return errors([(row["predicted_ms"], row["measured_ms"])])[0]
