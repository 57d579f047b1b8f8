"""Papers' values beside ours as text, and as one page of HTML with plots."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from linkweave.bench.command import options
from linkweave.bench.reproduce.measured import COMMANDS
from linkweave.bench.reproduce.papers import TITLES, Done
from linkweave.bench.reproduce.rows import GPU, HOWS, INPUT, OTHER, Plot, Row

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which colour-blind readers tell apart; marks and hatches differ as well."""
MARKS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def value(found: float | str | None, unit: str) -> str:
    """A value as the tables have it."""
    if found is None:
        return "-"
    if isinstance(found, str):
        return found
    found = 0.0 if abs(found) < 1e-9 else found
    if isinstance(found, int) or (float(found).is_integer() and abs(found) < 1e6):
        text = f"{found:g}"
    else:
        text = f"{found:,.0f}" if abs(found) >= 1000 else f"{found:.3g}"
    return f"{text} {unit}".rstrip()


def paper_text(paper: str, done: Sequence[Done]) -> str:
    rows = [row for one in done for row in one.part.rows]
    shown = [
        (str(number), row.item, row.what, value(row.theirs, row.unit), value(row.ours, row.unit),
         row.difference, row.how.split(",")[0].removeprefix("measured ") or "not reproduced")
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    heads = ("", "item", "value", "paper", "ours", "diff", "how")
    lines = [TITLES[paper], "", options.table(heads, shown, (1, 2, 6), wrapped=(2, 3, 4)), ""]
    reasons: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        if row.reason:
            reasons.setdefault(row.reason, []).append(str(number))
    words = [f"{', '.join(at)}: {why}" for why, at in reasons.items()]
    words += [note for one in done for note in one.part.notes]
    records: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        if row.record:
            records.setdefault(row.record, []).append(str(number))
    words += [f"{', '.join(at)}: {name}.json, {COMMANDS[name]}" for name, at in records.items()]
    return "\n".join([*lines, *(textwrap.fill(word, options.WIDTH) for word in words)])


def summary(done: Sequence[Done]) -> str:
    """How many values papers print, how ours were found, and how near they are; empty if the papers
    print none. Shares count by their ratio, "A over B" by the gain."""
    every = [row for one in done if one.paper != "predictions" for row in one.part.rows]
    rows = [row for row in every if row.counts]
    if not rows:
        return ""
    lost = sum(row.ours is None for row in rows)
    counts = [
        f"{count} {how}" for how in HOWS if (count := sum(r.how.startswith(how) for r in rows))
    ]
    apart = [abs(row.apart) for row in rows if row.apart is not None]
    near = ", ".join(
        f"{sum(share <= limit for share in apart)} within {limit:.0%}" for limit in (0.1, 0.3)
    )
    words = [row.holds for row in rows if row.holds is not None]
    inputs = sum(row.how.startswith(INPUT) for row in every)
    ours = [row for row in every if row.theirs is None]
    own = sum(row.how.startswith("measured") for row in ours)
    return (
        f"{len(rows)} values of papers: {', '.join(counts)}; {lost} not reproduced, "
        f"{lost / len(rows):.0%}. Of {len(apart)} that are numbers on both sides, {near}; of "
        f"{len(words)} ranges and limits in words, {sum(words)} hold. Not counted: {inputs} that "
        f"are the papers' own inputs, {sum(row.item == OTHER for row in every)} of another "
        f"measurement, {len(ours)} that are ours alone, of which {own} are measured"
    )


def page(done: Sequence[Done]) -> str:
    words, papers = summary(done), dict.fromkeys(one.paper for one in done)
    body = [f"<p>{html.escape(words)}</p>"] if words else []
    links = (f'<a href="#{paper}">{html.escape(TITLES[paper])}</a>' for paper in papers)
    body.append(f"<nav>{' | '.join(links)}</nav>")
    for paper in papers:
        parts = [one for one in done if one.paper == paper]
        body.append(f'<h2 id="{paper}">{html.escape(TITLES[paper])}</h2>')
        plots = [plot for one in parts for plot in one.part.plots]
        body.append(f'<div class="plots">{"".join(map(_figure, plots))}</div>')
        rows = [row for one in parts for row in one.part.rows]
        head = "".join(f"<th>{name}</th>" for name in HEADS)
        body.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>')
        body += map(_row, rows)
        body.append("</tbody></table></div>")
        notes = [note for one in parts for note in one.part.notes]
        body.append("".join(f"<p>{html.escape(note)}.</p>" for note in notes))
    rows = [row for one in done for row in one.part.rows]
    ran = any(row.how.startswith(GPU) for row in rows)
    return _PAGE.replace("BODY", "\n".join(body)).replace(
        "WHERE", "" if ran else " No GPU has run any of this."
    )


HEADS = ("item", "value", "paper", "ours", "difference", "how", "reason and command")


def _row(row: Row) -> str:
    how = row.how or "not reproduced"
    cells = (row.item, row.what, value(row.theirs, row.unit), value(row.ours, row.unit),
             row.difference, how, row.reason)  # fmt: skip
    kind = "" if row.how else ' class="lost"'
    texts = [html.escape(cell) for cell in cells]
    if row.record:
        texts[-1] += f"<br><code>{html.escape(COMMANDS[row.record])}</code>"
    named = (f'<td data-name="{name}">{text}</td>' for name, text in
             zip(HEADS, texts, strict=True) if text or name != HEADS[-1])  # fmt: skip
    return f"<tr{kind}>{''.join(named)}</tr>"


def _figure(plot: Plot) -> str:
    return f"<figure>{drawn(plot)}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"


def drawn(plot: Plot) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = {"svg.hashsalt": plot.title, "svg.fonttype": "none", "font.size": 9}
    with plt.rc_context(settings):
        figure, axis = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
        _draw(axis, plot)
        axis.set_title(plot.title, fontsize=10, loc="left")
        axis.set_xlabel(plot.x)
        axis.set_ylabel(plot.y)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        made = io.StringIO()
        figure.savefig(made, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = made.getvalue()
    label = html.escape(f"{plot.title}. {plot.caption}", quote=True)
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _draw(axis: Any, plot: Plot) -> None:
    names = list(dict.fromkeys(x for series in plot.series for x in series.x))
    width = 0.8 / max(1, len(plot.series))
    for i, series in enumerate(plot.series):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[(i + i // len(COLOURS)) % len(MARKS)]
        if plot.kind == "bar":
            at = [names.index(x) + (i - (len(plot.series) - 1) / 2) * width for x in series.x]
            axis.bar(at, series.y, width, color=colour, label=series.name, edgecolor="white",
                     hatch=HATCHES[i % len(HATCHES)])  # fmt: skip
        else:
            axis.plot(
                series.x,
                series.y,
                color=colour,
                marker=mark,
                markersize=4,
                linestyle="-" if plot.kind == "line" else "none",
                label=series.name,
            )
    if plot.kind == "bar":
        turned = max(len(str(name)) for name in names) > 9
        axis.set_xticks(range(len(names)), names, rotation=30 if turned else 0,
                        ha="right" if turned else "center")  # fmt: skip
    for letter in plot.log:
        getattr(axis, f"set_{letter}scale")("log")
    if plot.level is not None:
        axis.axhline(plot.level, color="0.5", linewidth=0.8, linestyle=":")
    if plot.diagonal:
        ends = [
            min(axis.get_xlim()[0], axis.get_ylim()[0]),
            max(axis.get_xlim()[1], axis.get_ylim()[1]),
        ]
        axis.plot(ends, ends, color="0.5", linewidth=0.8, linestyle=":")


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>linkweave: papers beside ours</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1250px; padding: 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; flex: 1 1 400px; max-width: 600px; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: 13px; color: #444; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; min-width: 900px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
         border-bottom: 1px solid #ddd; }
td:nth-child(3), td:nth-child(4), td:nth-child(5) { min-width: 5.5rem; max-width: 14rem; }
td:first-child { white-space: nowrap; }
tr.lost td { color: #555; font-style: italic; } nav { margin: .5rem 0 1rem; }
code { font-size: 12px; color: #444; overflow-wrap: anywhere; }
@media (max-width: 760px) { table { min-width: 0; } thead { display: none; }
  tr { display: block; border-bottom: 2px solid #bbb; padding: .3rem 0; }
  td { display: block; border: 0; padding: .05rem 0; max-width: none !important; }
  td::before { content: attr(data-name) ": "; color: #666; } }
</style>
</head>
<body>
<h1>Papers beside linkweave</h1>
<p>Every table and figure that has values: what the paper printed, what linkweave gives, how it was
found, and why they differ.WHERE</p>
BODY
</body>
</html>
"""
