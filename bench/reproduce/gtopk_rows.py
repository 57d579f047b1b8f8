"""The gTop-k paper's tables and figures as rows beside ours (`gtopk` computes them)."""

from __future__ import annotations

from collections.abc import Callable

from linkweave.bench.reproduce import gtopk
from linkweave.bench.reproduce.gtopk_paper import METHODS, WORKERS
from linkweave.bench.reproduce.gtopk_tables import NAMES
from linkweave.bench.reproduce.measured import Recorded, here, measured
from linkweave.bench.reproduce.rows import (
    COMPUTED,
    CORE,
    CPU_RANKS,
    NETWORK,
    Part,
    Plot,
    Row,
    Series,
    mean,
)

EXCHANGE = "gtopk-vgg16-4-hosts-1gbit"
PRINTED = {"VGG-16": (7.5, 1.5), "ResNet-20": (2.7, 1.1), "AlexNet": (12.8, 1.7),
           "ResNet-50": (3.65, 1.3)}  # fmt: skip
"""Table VII: how many times faster gTop-k is than dense and than top-k."""
DENSE = "the paper's dense all-reduce takes 3 to 12 times equation 5 on 32 workers"
COMMUNICATION = (
    "equation 7 explains less than 2 % of what the paper measured for its large models: about "
    "three passes of the whole gradient over PCIe do (linkweave simulate --gtopk)"
)
DIGITS = "a CNN on handwritten digits in place of Cifar-10"
NOTES = (
    "figures 1 to 4 are drawings, tables I to V name equations, hardware, data and models",
    "equations 5 to 7 with the paper's a and b; nothing is fitted",
)


def scaling() -> Part:
    """Tables I, VI and VII and figures 9 to 11."""
    found = gtopk.rows()
    crossings = found.crossovers
    rows = [
        Row("figure 9, left", "workers from which gTop-k is faster than top-k at 100 MB",
            "more than few, at most 32", float(crossings["equations"]), COMPUTED),
        Row("figure 9, right", "MB from which it is faster on 32 workers", "small",
            found.crossing[32] * 4e-6, COMPUTED),
    ]  # fmt: skip
    last = {(s.model, s.method): s for s in found.figure10 if s.workers == WORKERS[-1]}
    for model, printed in PRINTED.items():
        for other, theirs in zip(METHODS[:2], printed, strict=True):
            ours = last[model, "gtopk"].throughput / last[model, other].throughput
            rows.append(
                Row(
                    "table VII",
                    f"{model}: gTop-k over {NAMES[other]}, 32 workers",
                    theirs,
                    ours,
                    COMPUTED,
                    reason=DENSE if other == "dense" else "",
                )
            )
    over = [mean(last[m, "gtopk"].throughput / last[m, o].throughput for m in PRINTED)
            for o in METHODS[:2]]  # fmt: skip
    rows += [
        Row("figure 10", "gTop-k over dense on 32 workers, mean", 6.7, over[0], COMPUTED,
            reason=DENSE),
        Row("figure 10", "gTop-k over top-k on 32 workers, mean", 1.4, over[1], COMPUTED),
    ]  # fmt: skip
    for part in found.figure11:
        rows += [
            Row("figure 11", f"{part.model}: selection, ms", 1e3 * part.measured_selection,
                1e3 * part.selection, f"{CORE}, {here()}",
                reason="torch.topk on a P102-100 there, kernels.sparsify here"),
            Row("figure 11", f"{part.model}: communication, ms", 1e3 * part.measured_communication,
                1e3 * part.communication, COMPUTED, reason=COMMUNICATION),
        ]  # fmt: skip
    rows.append(
        Row(
            "table VI",
            "speed of one P102-100",
            "52 to 1,317 images/s",
            None,
            reason="needs that GPU; its times are taken as they are printed",
        )
    )
    steps = {method: [s for s in found.figure10 if s.method == method and s.model == "ResNet-50"]
             for method in METHODS}  # fmt: skip
    plots = [
        Plot("gTop-k, figure 10: ResNet-50", "Scaling efficiency on 1 Gbit/s: equations 5 to 7 "
             "beside the paper's raw figures.", "workers", "% of linear",
             tuple(Series(f"{NAMES[method]}{words}", tuple(s.workers for s in some),
                          tuple(100 * (s.efficiency if ours else s.measured_efficiency)
                                for s in some))
                   for method, some in steps.items()
                   for words, ours in (("", True), (", paper", False))), log="x"),
        Plot("gTop-k, figure 9, left", "An all-reduce of 100 MB at density 0.001.", "workers", "s",
             tuple(Series(NAMES[method], tuple(c.workers for c in found.figure9 if c.numel ==
                                               gtopk.NUMEL),
                          tuple(getattr(c, method) for c in found.figure9 if c.numel ==
                                gtopk.NUMEL)) for method in METHODS), log="xy"),
    ]  # fmt: skip
    return Part(tuple(rows), tuple(plots), NOTES)


def training() -> Part:
    """Figures 5 to 8 and 12: convergence, and the network."""

    def beyond(density: float) -> Callable[[Recorded], float]:
        """Points, or % of the loss, between gTop-k at this density and dense."""

        def figure(found: Recorded) -> float:
            chosen = (r for r in found.rows if r["gtopk"] and r["gtopk"]["density"] == density)
            return next(float(r["beyond_dense"]) for r in chosen if not r["gtopk"]["conserve"])

        return figure

    def ratio(found: Recorded) -> float:
        return float(found.row(hook="gTop-k")["ratio"])

    record = "convergence-{}-epyc-2-cores"
    rows = [
        measured("figure 5", "accuracy above dense, 4 workers, density 0.01", "nearly the same",
                 CPU_RANKS, record.format("digits-4"), beyond(0.01), "points",
                 f"{DIGITS}, 260 steps, 8 seeds"),
        measured("figure 5", "accuracy above dense, 7 workers, density 0.01", None, CPU_RANKS,
                 record.format("digits-7"), beyond(0.01), "points",
                 f"{DIGITS}, 260 steps, 8 seeds"),
        measured("figure 7", "loss of an LSTM above dense, 4 workers", "close", CPU_RANKS,
                 record.format("bible-4"), beyond(0.01), "%",
                 "the Bible in place of PTB, density 0.01 in place of 0.005, 250 steps"),
        measured("figure 12", "accuracy above dense, 4 workers, density 0.001", "close", CPU_RANKS,
                 record.format("digits-4-long"), beyond(0.001), "points",
                 f"{DIGITS}, 1,500 steps"),
        Row("figure 6", "convergence of AlexNet and ResNet-50", "close to dense", None,
            reason="needs ImageNet and GPUs"),
        measured("figure 8", "start-up of a message, ms", 0.436, NETWORK, "network-4x2-1gbit",
                 lambda f: 1e3 * _message(f)[0],
                 reason="gloo under a shared CPU of two cores; there MPI between real hosts"),
        measured("figure 8", "ns a byte", 9.0, NETWORK, "network-4x2-1gbit",
                 lambda f: 1e9 * _message(f)[1], reason="1 Gbit/s is 8 ns a byte at least"),
        measured("section IV-D", "VGG-16 of 138 M values, 4 hosts at 1 Gbit/s: exchange of gTop-k "
                 "over dense", None, NETWORK, EXCHANGE, ratio),
    ]  # fmt: skip
    return Part(tuple(rows))


def _message(found: Recorded) -> tuple[float, float]:
    """The start-up and the seconds per byte of a message, by a ring of 4 (US-Byte, equation 14),
    fitted to gloo's all-reduces from 1 MB."""
    from linkweave.collectives.overlap import fit

    rows = [r for r in found.rows if (r["collective"], r["op"]) == ("allreduce", "sum")]
    pairs = [(r["nbytes"], r["gloo_seconds"]) for r in rows if r["nbytes"] >= 1 << 20]
    return fit(pairs, workers=4).network.message
