"""nccl-tests' table, with the library, the model's prediction and its error beside."""

from __future__ import annotations

from linkweave.bench.allreduce import Row, Settings
from linkweave.bench.timing import machine


def header(settings: Settings) -> str:
    """What was run, on what, and the columns with their units."""
    info = machine()
    versions = ", ".join(f"{k} {v}" for k, v in info["versions"].items())
    batch = "SCHED_BATCH" if settings.batch else "default scheduling"
    return "\n".join([
        f"# all-reduce, {settings.ranks} CPU ranks on {settings.topology.name}, {batch}, "
        f"{settings.rounds} rounds, in place",
        f"# {info['cores']} cores, {info['cpu']}, Linux {info['kernel']}, {versions}",
        "# time: median over rounds of each round's median of the slowest rank; x gloo: median of",
        "# the rounds' ratios to gloo under SCHED_BATCH; near/far: flag round trip of two cores",
        f"{'size':>11}{'count':>11}{'type':>7}{'redop':>7}  {'library':22}{'time':>11}{'algbw':>8}"
        f"{'busbw':>8}{'#wrong':>8}{'x gloo':>8}{'model':>11}{'error':>8}  state",
        f"{'(B)':>11}{'(elements)':>11}{'':14}  {'':22}{'(us)':>11}{'(GB/s)':>8}{'(GB/s)':>8}"
        f"{'':16}{'(us)':>11}{'(%)':>8}",
    ])  # fmt: skip


def line(row: Row) -> str:
    """One library at one size."""
    ratio = f"{row.ratio:8.2f}" if row.ratio is not None else f"{'-':>8}"
    model = f"{'-':>11}{'-':>8}"
    if row.model_us is not None:
        error = (row.model_us - row.time_us) / row.time_us
        model = f"{row.model_us:11.1f}{error:8.0%}"
    return (
        f"{row.size:11}{row.count:11}{row.type:>7}{row.redop:>7}  {row.library[:22]:22}"
        f"{row.time_us:11.1f}{row.algbw:8.2f}{row.busbw:8.2f}{row.wrong:8}{ratio}{model}  "
        f"{row.state}"
    )
