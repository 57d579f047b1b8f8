"""`linkweave topo`: a machine's links and bounds, and pictures of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linkweave import collectives, topology
from linkweave.bench.command import options, plans
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import mscclpp, mscclpp_proof, mscclpp_timing
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.topology import Topology, bound, reducing_bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.checks import TopologyError
from linkweave.topology.compare import compare as match
from linkweave.topology.compare import in_words
from linkweave.topology.parts import PlanLike
from linkweave.topology.text import link_table


def topo(
    machine: options.MachineArgument,
    svg: Annotated[Path | None, typer.Option(help="Draw the machine to this SVG file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the machine to this PNG file.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Draw a plan over the links: a file of plan --json, MSCCL++, NCCL (its "
                          f"rings) or RCCL, or one of {', '.join(ALGORITHMS['allreduce'])}."),
    ] = None,
    part: Annotated[
        int | None,
        typer.Option("--tree", "--ring", "--phase", metavar="N",
                     help="Draw only tree, ring or phase N of the plan, counted from 1."),
    ] = None,
    all_links: Annotated[
        bool, typer.Option("--all-links", help="Draw PCIe, CPUs and NICs beside NVLinks as well.")
    ] = False,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
    compare: Annotated[
        str | None, typer.Option(help="Say whether that machine is wired alike, or what differs.")
    ] = None,
    xml: Annotated[
        Path | None, typer.Option(help="Write the machine in NCCL's form (NCCL_TOPO_FILE).")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Print a machine's links and bounds; draw it and plans."""
    found = options.machine_of(machine, gpus, measured, gpu)
    paths = [p for p in (svg, png) if p]
    options.writable(svg=svg, png=png, xml=xml)
    drawn: PlanLike | None = None
    for flag, given in (("--plan", plan), ("--tree", part), ("--all-links", all_links)):
        if given is not None and given is not False and not paths:
            raise CollectiveError(f"{flag} draws: give --svg FILE or --png FILE as well")
    if plan and (file := plans.plan_file(plan)):
        theirs = plans.read_plans(file, found)
        if isinstance(theirs, mscclpp.ExecutionPlan):
            mscclpp_proof.verify(theirs, found)
            drawn = mscclpp_timing.as_drawn(theirs)
        else:
            drawn = theirs[0]
    if paths:  # first, as it may be refused
        with options.console.status("drawing"):
            if plan and drawn is None:
                drawn = collectives.plan_allreduce(found, 1 << 26, plan)
            topology.draw(found, paths, drawn, part, all_links)
    if compare is not None:
        other = topology.load(compare)
        if as_json:
            mapping, differences = match(found, other)
            print(json.dumps({"mapping": mapping, "differences": differences}))
        else:
            print(comparison(found, other))
    elif as_json:
        print(found.to_json())
    else:
        with options.console.status("bounding"):
            text = report(found)
        print(text)
    if xml:
        xml.write_text(topology.to_nccl_xml(found))
        options.console.print(f"written: {xml}", highlight=False)
    for path in paths:
        options.console.print(f"drawn: {path}", highlight=False)


def report(machine: Topology) -> str:
    lines = [str(machine), "", "links:", *(f"  {line}" for line in link_table(machine) or ["none"])]
    fabric = len(machine.fabric)
    if fabric < len(machine.links):
        lines.append(f"plans and bounds use {fabric} of the {len(machine.links)} directed links")
    return "\n".join([*lines, "", *bounds(machine)])


def bounds(machine: Topology) -> list[str]:
    try:
        every = [bound(machine, collective) for collective in BOUNDED]
        return [str(each) for each in (*every, reducing_bound(machine)) if each]
    except TopologyError as error:
        return [f"no bound: {error}"]


def comparison(one: Topology, other: Topology) -> str:
    """Say whether two machines are wired alike, under which numbers, and what differs."""
    mapping, differences = match(one, other)
    if mapping is None:
        return "\n".join([f"{one.name} and {other.name} are wired differently:", *differences])
    lines = [f"{one.name} is isomorphic to {other.name}, {in_words(mapping)}"]
    if differences:
        lines += ["what collectives leave out differs:", *differences]
    return "\n".join(lines)
