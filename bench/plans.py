"""`linkweave plan` and `linkweave simulate`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from linkweave import collectives
from linkweave.bench.machine import explanation_json
from linkweave.bench.options import (
    WIDTH,
    AlgorithmOption,
    ChunksOption,
    CollectiveOption,
    GpusOption,
    JsonOption,
    MeasuredOption,
    ModelOption,
    OptionalMachine,
    OptionalSize,
    PlanFileOption,
    RootOption,
    SizeOption,
    TopologyOption,
    console,
    machine_of,
    parse_size,
    table,
)
from linkweave.collectives import CollectiveError, Plan
from linkweave.collectives.planning.cost import MAX_CHUNKS
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose, predict
from linkweave.collectives.planning.simulate import Timeline
from linkweave.topology import Topology, bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.loading import read
from linkweave.topology.parts import parts_of

_FEW = 16  # ranks up to which comparing all algorithms takes a second or two
MOST_CHUNKS = 8 * MAX_CHUNKS
LEGEND = (
    "busiest link: share of the time in which it carries bytes; detours: connections over another "
    "GPU;\nshared: connections take turns on some link"
)


def read_plan(path: Path, machine: Topology) -> Plan:
    """Read a plan from JSON and verify it on the machine. Raises CollectiveError."""
    made = Plan.from_json(read(str(path)))
    collectives.verify(made, machine)
    return made


def plan(
    size: SizeOption,
    machine: OptionalMachine = None,
    topo: TopologyOption = "",
    collective: CollectiveOption = "allreduce",
    root: RootOption = 0,
    algorithm: AlgorithmOption = "auto",
    chunks: ChunksOption = None,
    gpus: GpusOption = None,
    gpu: ModelOption = None,
    measured: MeasuredOption = None,
    steps: Annotated[bool, typer.Option("--steps", help="Print every step of every rank.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Compare all algorithms and print why one is chosen.")
    ] = False,
    sparse: Annotated[
        int | None, typer.Option(help="With --explain: entries a rank of sparse all-reduces.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make and verify the plan for a message, and summarise it.

    Large clusters take longer: 64 GPUs about 25 s.
    """
    found, nbytes = machine_of(one_of(machine, topo), gpus, measured, gpu), parse_size(size)
    _sane(chunks)
    if explain:
        if collective != "allreduce":
            raise CollectiveError("--explain is for all-reduce; simulate compares the others")
        if algorithm != "auto" or chunks is not None:
            raise CollectiveError("--explain compares all: leave out --algorithm and --chunks")
        with console.status("comparing"):
            told = collectives.explain(found, nbytes, sparse)
        print(explanation_json(told) if as_json else told)
        return
    if sparse is not None:
        raise CollectiveError("--sparse goes with --explain")
    with console.status("planning"):
        made = collectives.plan_collective(collective, found, nbytes, root, algorithm, chunks)
        if as_json or steps:
            text = made.to_json() if as_json else str(made)
        else:
            reason = _reason(found, nbytes, made, algorithm)
            text = summary(made, found, nbytes, reason)
        if algorithm != "auto":
            _warn(made, found, nbytes)
    print(text)


def summary(made: Plan, machine: Topology, nbytes: int, reason: str) -> str:
    """Describe a plan and its predicted time, one line for each fact."""
    line = collectives.simulate(made, machine, nbytes)
    facts = {
        "plan": f"{made.collective} of {size_text(nbytes)} on {machine.name}",
        "algorithm": reason if made.algorithm in reason else f"{made.algorithm}: {reason}",
        "predicted": f"{line.seconds * 1e6:.1f} us, {line.algbw / 1e9:.2f} GB/s; the first chunk "
                     f"is ready after {line.first_chunk_seconds * 1e6:.1f} us",
    }  # fmt: skip
    if made.collective in BOUNDED and line.seconds:
        best = bound(
            machine, made.collective, made.root if made.collective == "broadcast" else None
        )
        share = nbytes / line.seconds * float(best.seconds_per_byte)
        facts["bound"] = f"{best}; this plan reaches {share:.0%}"
    parts = parts_of(made, machine)
    several = "s"[: len(parts) != 1]
    facts["made of"] = f"{len(parts)} {parts[0].name.split()[0]}{several}" if parts else "nothing"
    if made.trees:
        depths = [tree.depth for tree in made.trees]
        facts["made of"] += f", depth {' to '.join(map(str, sorted({min(depths), max(depths)})))}"
    facts["made of"] += f", on {len({track.channel for track in made.tracks})} channels"
    facts["detours"] = "; ".join(
        f"{a} - {b} over {', '.join(map(str, via))}" for a, *via, b in made.detours
    ) or "none"  # fmt: skip
    facts["chunks"] = f"{made.num_chunks} of {size_text(made.chunk_bytes(nbytes))} at most"
    facts["links"] = "exclusive" if made.exclusive else "; ".join(("shared", *made.notes))
    return "\n".join(
        textwrap.fill(fact, WIDTH, initial_indent=f"{name:11}", subsequent_indent=" " * 11)
        for name, fact in facts.items()
    ) + "\n--steps prints the steps of every rank"  # fmt: skip


def _reason(machine: Topology, nbytes: int, made: Plan, algorithm: str) -> str:
    if algorithm != "auto":
        return "as asked"
    if made.collective == "allreduce" and len(machine.gpus) <= _FEW:
        return collectives.explain(machine, nbytes).reason
    names = candidates(machine, made.collective, made.root)
    return f"auto expects it to be the fastest of {len(names)} algorithms"


def _warn(made: Plan, machine: Topology, nbytes: int) -> None:
    """Warn if the algorithm is predicted to be slower than auto's choice."""
    auto = choose(machine, nbytes, made.collective, made.root)
    best = predict(machine, nbytes, auto, made.collective, made.root)[0]
    seconds = collectives.simulate(made, machine, nbytes).seconds
    if seconds > 1.02 * best:
        console.print(
            f"warning: {made.algorithm} is predicted to take {seconds / best:.2f} times as long as "
            f"{auto}, which auto would take", highlight=False, soft_wrap=True,
        )  # fmt: skip


def one_of(machine: str | None, topo: str) -> str:
    """The machine, as an argument or as --topo; by default this one."""
    if machine and topo:
        raise CollectiveError(f"the machine is {machine} or --topo {topo}: give one of them")
    return machine or topo or "auto"


def _sane(chunks: int | None) -> None:
    if chunks is not None and chunks > MOST_CHUNKS:
        raise CollectiveError(f"--chunks must be at most {MOST_CHUNKS}, not {chunks}")


def simulate(
    context: typer.Context,
    size: OptionalSize = None,
    machine: OptionalMachine = None,
    topo: TopologyOption = "",
    collective: CollectiveOption = "allreduce",
    root: RootOption = 0,
    algorithm: AlgorithmOption = "all",
    chunks: ChunksOption = None,
    gpus: GpusOption = None,
    gpu: ModelOption = None,
    measured: MeasuredOption = None,
    plan: PlanFileOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace (one algorithm only).")
    ] = None,
    gtopk: Annotated[
        bool,
        typer.Option("--gtopk", help="Print the gTop-k paper's tables beside ours (15 s)."),
    ] = False,
    embrace: Annotated[
        bool,
        typer.Option("--embrace", help="Print the EmbRace paper's tables beside ours (5 s)."),
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --embrace: a text whose words are tokens as well."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="With --gtopk or --embrace: draw its figures.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a message by each algorithm, or by a plan."""
    if gtopk:
        _alone(context, "--gtopk", {"gtopk", "png", "as_json"})
        _gtopk(png, as_json)
        return
    if embrace:
        _alone(context, "--embrace", {"embrace", "corpus", "png", "as_json"})
        _embrace(corpus, png, as_json)
        return
    if png is not None:
        raise CollectiveError("--png draws the figures of --gtopk or --embrace: give one of them")
    if corpus is not None:
        raise CollectiveError("--corpus is the text of --embrace: give that as well")
    if size is None:
        raise CollectiveError("give the message's --size, such as 64M, or --gtopk or --embrace")
    found, nbytes = machine_of(one_of(machine, topo), gpus, measured, gpu), parse_size(size)
    _sane(chunks)
    given, chosen = None, None
    if plan is not None:
        if (collective, root, algorithm, chunks) != ("allreduce", 0, "all", None):
            raise CollectiveError(
                "--plan has its own collective, root, algorithm and chunks: leave those out"
            )
        given = read_plan(plan, found)
        collective, root, names = given.collective, given.root, (given.algorithm,)
    else:
        with console.status("planning"):
            collectives.plan_collective(collective, found, nbytes, root)  # refuses what is wrong
            chosen = choose(found, nbytes, collective, root)
            every = algorithm == "all"
            names = candidates(found, collective, root) if every else (algorithm,)
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one algorithm: name it with --algorithm")
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in progress.track(names, description="simulating"):
            made = given or collectives.plan_collective(
                collective, found, nbytes, root, name, chunks
            )  # fmt: skip
            line = collectives.simulate(made, found, nbytes)
            rows.append(_row(made, line))
            if trace:
                line.save_trace(trace)
    rows.sort(key=lambda row: row["time_us"])
    if as_json:
        what = {"topology": found.name, "collective": collective, "size": nbytes}
        print(json.dumps({**what, "auto": chosen, "rows": rows}))
        return
    taken = f"; auto takes {chosen}" if chosen else f" by {plan}"
    print(f"{collective} of {size_text(nbytes)} on {found.name}{taken}")
    print(table(
        ("algorithm", "chunks", "us", "GB/s", "first chunk us", "busiest link", "detours", ""),
        [(r["algorithm"], r["chunks"], f"{r['time_us']:.1f}", f"{r['algbw_gbs']:.2f}",
          f"{r['first_chunk_us']:.1f}", f"{r['busiest_link']:.0%}", r["detours"],
          "" if r["exclusive"] else "shared") for r in rows],
    ))  # fmt: skip
    print(LEGEND)


def _alone(context: typer.Context, flag: str, allowed: Collection[str]) -> None:
    """Raise CollectiveError, with their names, if parameters were given that are not `allowed`."""
    wrong = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and parameter.name not in allowed
        and (source := context.get_parameter_source(parameter.name))
        and source.name == "COMMANDLINE"
    ]  # fmt: skip
    if wrong:
        raise CollectiveError(
            f"{flag} has its own clusters and sizes: leave out {', '.join(wrong)}"
        )


def _gtopk(png: Path | None, as_json: bool) -> None:
    from linkweave.bench.reproduce import gtopk, gtopk_figures, gtopk_tables

    _tables(gtopk.rows, gtopk.TOTAL, gtopk_tables.tables, gtopk_figures.draw, png, as_json)


def _embrace(corpus: Path | None, png: Path | None, as_json: bool) -> None:
    from linkweave.bench.reproduce import embrace, embrace_figures, embrace_tables
    from linkweave.bench.reproduce.embrace_tokens import read_words

    words = None if corpus is None else read_words(corpus)
    _tables(lambda done: embrace.rows(done, words), embrace.TOTAL, embrace_tables.tables,
            embrace_figures.draw, png, as_json)  # fmt: skip


def _tables(
    rows: Callable[[Callable[[], None]], Any], total: int, tables: Callable[[Any], str],
    draw: Callable[[Any, Path], None], png: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compute a paper's rows, which call what they are given `total` times; print and draw them."""
    if png and png.suffix != ".png":
        raise CollectiveError(f"--png draws into a file that ends in .png, not {png}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=total)
        found = rows(lambda: progress.update(task, advance=1))
    print(json.dumps(asdict(found)) if as_json else tables(found))
    if png:
        draw(found, png)
        console.print(f"drawn: {png}", highlight=False)


def _row(made: Plan, line: Timeline) -> dict[str, Any]:
    return {
        "algorithm": made.algorithm,
        "chunks": made.num_chunks,
        "time_us": line.seconds * 1e6,
        "algbw_gbs": line.algbw / 1e9,
        "first_chunk_us": line.first_chunk_seconds * 1e6,
        "busiest_link": max(line.utilisation.values(), default=0.0),
        "exclusive": made.exclusive,
        "detours": len(made.detours),
    }
