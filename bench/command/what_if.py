"""`linkweave what-if`: a machine before and after a change: its bound, its plan, its step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from linkweave import collectives, topology
from linkweave.bench.command import gantt, options, pictures
from linkweave.bench.command.plans import one_of
from linkweave.bench.command.predict import POLICIES, network_of, work_of
from linkweave.bench.command.view import write
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Schedule, models
from linkweave.collectives.planning.explain import size_text
from linkweave.topology import Topology
from linkweave.topology.edits import nics_on_gpus, parse_ends, with_links, with_nics, without_links

EDITS = "--remove-link", "--add-link", "--add-nic"


@dataclass(frozen=True)
class Outlook:
    """What a machine gives: bytes/s, seconds; steps by policy, if a model was named."""

    machine: str
    bound: float
    bottleneck: str
    algorithm: str
    algbw: float
    seconds: float
    steps: dict[str, float]
    work: str  # what a GPU is taken to compute at; empty without a model
    made: tuple[Schedule, ...] = ()  # the schedules of `steps`


def what_if(
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove-link", metavar="A-B[=N]",
                     help="Take out all links between two GPUs or switches, or N of them."),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add-link", metavar="A-B[=N]", help="Add a link, or N of them."),
    ] = None,
    nics: Annotated[
        int,
        typer.Option(
            "--add-nic", metavar="N",
            help="Add N NICs beside each of a cluster's; NICs on GPUs share a port.",
        ),
    ] = 0,
    to: Annotated[
        str, typer.Option("--to", metavar="MACHINE", help="Compare with another machine instead.")
    ] = "",
    size: Annotated[str, typer.Option("--size", "-s", help="The all-reduce to plan.")] = "64M",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Predict steps, of a profile from a file or one of "
                     f"{', '.join(models())}."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples on each GPU; by default 64.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that training reaches on one GPU.")
    ] = None,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw both machines with their plans to this file.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Show both machines, up to 72 GPUs, with plans in motion on a page, an "
                     ".html file."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Show what a change of a machine's links would do."""
    if to and gpus:
        raise CollectiveError("--gpus would take GPUs out of the first machine only: leave it out")
    for flag, given in (("--batch", batch), ("--tflops", tflops)):
        if given is not None and model is None:
            raise CollectiveError(f"{flag} belongs to --model MODEL: give that as well")
    before = options.machine_of(one_of(machine, topo), gpus, None, gpu)
    if bool(remove or add or nics) == bool(to):
        raise CollectiveError(
            "name what changes: --remove-link, --add-link or --add-nic; or the other machine, --to"
        )
    options.writable(png=png, page=page)
    edits = remove or (), add or (), nics
    after = options.machine_of(to, None, None, gpu) if to else edited(before, *edits)
    for one in (before, after) if page else ():
        pictures.check(one)
        if len(one.gpus) > pictures.GPUS:
            raise CollectiveError(
                f"--page shows at most {pictures.GPUS} GPUs: {one.name} has {len(one.gpus)}"
            )
    nbytes = options.parse_size(size)
    pair = [outlook(one, nbytes, model, batch, tflops) for one in (before, after)]
    if as_json:
        told = [{k: v for k, v in vars(one).items() if k != "made"} for one in pair]
        print(json.dumps({"size": nbytes, "before": told[0], "after": told[1]}))
    else:
        print(text(pair[0], pair[1], nbytes))
        if nics and pair[0].bound == pair[1].bound and nics_on_gpus(before):
            print("note: NICs on a GPU share its port, which is as fast as one of them")
    among = None if to else edited(before, (), *edits[1:])  # with all links of both
    if png:
        with options.console.status("drawing"):
            draw((before, after), among, nbytes, png)
        options.console.print(f"drawn: {png}", highlight=False)
    if page:
        with options.console.status("simulating"):
            views = pictures.before_and_after(before, after, among, nbytes)
        charts = [
            replace(gantt.predicted(made, f"{name}, {made.policy}"), about=told.work)
            for name, told in zip(("before", "after"), pair, strict=True) for made in told.made
        ]  # fmt: skip
        change = f"to {after.name}" if to else " ".join(
            f"{flag} {value}" for flag, values in zip(EDITS, edits, strict=True)
            for value in (values if isinstance(values, Sequence) else [values] * bool(values))
        )  # fmt: skip
        write(page, f"{before.name}: what if", change, views,
              charts)  # fmt: skip


def edited(machine: Topology, remove: Iterable[str], add: Iterable[str], nics: int) -> Topology:
    for ends in remove:
        machine = without_links(machine, parse_ends(ends, "--remove-link"))
    for ends in add:
        machine = with_links(machine, parse_ends(ends, "--add-link"))
    return with_nics(machine, nics) if nics else machine


def outlook(
    machine: Topology, nbytes: int, model: str | None, batch: int | None, tflops: float | None
) -> Outlook:
    """Bound, plan and steps of a machine. Raises CollectiveError if it has no plan."""
    with options.console.status(f"planning on {machine.name}"):
        best = topology.bound(machine, "allreduce")
        plan = collectives.plan_allreduce(machine, nbytes)
        line = collectives.simulate(plan, machine, nbytes)
    steps, words, made = {}, "", []
    if model is not None:
        work = work_of(model, machine, batch, tflops)
        network = network_of(machine)
        made = [overlap.plan(work.profile, network, name) for name in POLICIES]
        steps = {schedule.policy: schedule.predicted_seconds for schedule in made}
        words = work.words or "measured times, taken to be the same on both machines"
    return Outlook(
        machine.name, best.algbw, best.bottleneck, plan.algorithm, line.algbw, line.seconds, steps,
        words, tuple(made),
    )  # fmt: skip


def text(before: Outlook, after: Outlook, nbytes: int) -> str:
    rows = [
        ("bound, GB/s", *_pair(before.bound / 1e9, after.bound / 1e9)),
        ("plan", before.algorithm, after.algorithm, ""),
        (f"all-reduce of {size_text(nbytes)}, GB/s", *_pair(before.algbw / 1e9, after.algbw / 1e9)),
        ("all-reduce, us", *_pair(before.seconds * 1e6, after.seconds * 1e6)),
    ]
    rows += [
        (f"step with {policy}, ms", *_pair(before.steps[policy] * 1e3, after.steps[policy] * 1e3))
        for policy in before.steps
    ]
    lines = [
        f"before: {before.machine}", f"after:  {after.machine}", "",
        options.table(("", "before", "after", "change"), rows), "",
        f"bottleneck before: {before.bottleneck}", f"bottleneck after: {after.bottleneck}",
    ]  # fmt: skip
    if before.work == after.work:
        lines += [f"steps: {before.work}"] * bool(before.work)
    else:
        lines += [f"steps before: {before.work}", f"steps after: {after.work}"]
    return "\n".join(lines)


def _pair(one: float, other: float) -> tuple[str, str, str]:
    by = round(other / one - 1, 3) if one else 0.0
    change = (f"{by:+.1%}" if by else "0.0%") if one else ""
    return f"{one:,.1f}", f"{other:,.1f}", change


def draw(
    machines: Iterable[Topology], among: Topology | None, nbytes: int, path: Path
) -> None:  # fmt: skip
    """Draw the machines with their plans side by side, laid out as `among`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with TemporaryDirectory() as folder:
        pictures = []
        for i, machine in enumerate(machines):
            file = Path(folder) / f"{i}.png"
            plan = collectives.plan_allreduce(machine, nbytes)
            topology.draw(machine, [file], plan, like=among)
            pictures.append(plt.imread(file))
    figure, axes = plt.subplots(1, 2, figsize=(16, 8), layout="constrained")
    for axis, picture in zip(axes, pictures, strict=True):
        axis.imshow(picture)
        axis.set_axis_off()
    figure.savefig(path, dpi=100)
    plt.close(figure)
