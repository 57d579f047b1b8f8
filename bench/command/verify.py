"""`linkweave verify`: proves plans, ours and those of other engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from linkweave.bench.command import options
from linkweave.bench.command.plans import plans_in
from linkweave.collectives import CollectiveError, PlanError
from linkweave.collectives.foreign import mscclpp, mscclpp_proof, nccl_graph, rccl
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.verify import check_form, check_links, prove
from linkweave.topology.loading import read

_MOST_TOLD = 12
_NAMED = re.compile(r"rank (\d+), thread block (\d+), op (\d+)")


def steps_before(plan: mscclpp.ExecutionPlan, fault: str) -> Iterator[str]:
    """What the thread blocks that a fault names do up to there."""
    for rank, block, last in dict.fromkeys(_NAMED.findall(fault)):
        ops = plan.gpus[int(rank)].blocks[int(block)]
        yield f"rank {rank}, thread block {block}:"
        for at in range(max(0, int(last) + 1 - _MOST_TOLD), int(last) + 1):
            mark = ">" if at == int(last) else " "
            yield f" {mark} op {at}: {ops[at]}"
            yield from (f"      {at}.{k}: {op}" for k, op in enumerate(ops[at].body))


def verify(
    file: Annotated[
        Path, typer.Argument(help="Of plan --json, MSCCL++, NCCL (a graph) or RCCL (trees).")
    ],
    topo: Annotated[
        str, typer.Option("--topology", "--topo", "-t", help="The machine whose links it may use.")
    ] = "",
    gpus: options.GpusOption = None,
) -> None:
    """Prove that a plan is right, or tell its first fault."""
    text = read(str(file))
    machine = options.machine_of(topo or "auto", gpus) if topo or gpus else None
    shown = ["result", "order of accesses", "progress"]
    if mscclpp.is_plan(text):
        foreign = mscclpp.read(text)
        try:
            remark = mscclpp_proof.verify(foreign, machine)
        except PlanError as error:
            raise PlanError("\n".join([str(error), *steps_before(foreign, str(error))])) from None
        blocks = sum(len(gpu.blocks) for gpu in foreign.gpus)
        how = "in place" if foreign.inplace else "out of place"
        print(
            f"{foreign.name}: {foreign.collective} of {len(foreign.gpus)} ranks, {how}, "
            f"{blocks} thread blocks, by MSCCL++"
        )
        shown.append("that executions of one size may follow one another")
    elif nccl_graph.is_graph(text) or rccl.is_text(text):
        if machine is None:
            raise CollectiveError("NCCL's and RCCL's are of a machine: name it with --topo")
        plans = plans_in(text, file, machine)
        print(f"{file.name}: {', '.join(made.algorithm for made in plans)} of {plans[0].size} GPUs")
        remark = "; ".join(note for made in plans for note in made.notes)
    else:
        made = Plan.from_json(text)
        remark = ""
        check_form(made)
        if machine is not None:
            check_links(made, machine)
        prove(made)
        print(f"{made.collective} of {made.size} ranks by {made.algorithm}")
    if machine is not None:
        shown.append(f"links of {machine.name}")
    else:
        remark = "; ".join(filter(None, ("without --topo, no links were checked", remark)))
    print(f"right: {', '.join(shown)}" + (f". But {remark}" if remark else ""))
