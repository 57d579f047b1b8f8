"""The table of `linkweave bench collectives`, like that of nccl-tests."""

from __future__ import annotations

from linkweave.bench.collectives import Row, Settings
from linkweave.bench.timing import NEAR_NS, machine


def header(settings: Settings) -> str:
    """What was run, on what, and the columns with their units."""
    info = machine()
    versions = ", ".join(f"{k} {v}" for k, v in info["versions"].items())
    batch = "SCHED_BATCH" if settings.batch else "default scheduling"
    return "\n".join([
        f"# {', '.join(settings.collectives)}: {settings.ranks} CPU ranks on "
        f"{settings.topology.name}, {batch}, {settings.rounds} rounds, float32, sum",
        f"# {info['cores']} cores, {info['cpu']}, Linux {info['kernel']}",
        f"# {versions}",
        "# us: median over rounds of each round's median of the slowest rank; x gloo: median of",
        "# the rounds' ratios to gloo under SCHED_BATCH; model: predicted, with its error",
        "# near 4/7: in 4 of 7 checks the first two cores shared a close cache (a flag went there",
        f"# and back in less than {NEAR_NS} ns)",
        f"{'collective':14}{'bytes':>11}  {'library':16}{'us':>10}{'algbw':>8}{'busbw':>8}"
        f"{'#wrong':>8}{'x gloo':>8}{'model us':>10}{'error':>7}  state",
    ])  # fmt: skip


def line(row: Row) -> str:
    """One library at one size; GB/s are decimal."""
    ratio = f"{row.ratio:8.2f}" if row.ratio is not None else f"{'-':>8}"
    model = f"{'-':>10}{'-':>7}"
    if row.model_us is not None:
        error = (row.model_us - row.time_us) / row.time_us
        model = f"{row.model_us:10.1f}{error:7.0%}"
    return (
        f"{row.collective:14}{row.size:11}  {row.library[:16]:16}{row.time_us:10.1f}"
        f"{row.algbw:8.2f}{row.busbw:8.2f}{row.wrong:8}{ratio}{model}  {row.state.split(',')[0]}"
    )
