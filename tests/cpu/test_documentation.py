"""The README and docs/: every example runs and prints what is shown; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from linkweave import collectives, topology
from linkweave.bench.command.cli import app
from linkweave.collectives import overlap
from linkweave.topology.readers.measured import LinkFigures, PairFigure
from tests.cpu.commands import run_script, run_script_in_a_process
from tests.null.test_judge import new as nccl_tests_log

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TEXTS = {
    str(page.relative_to(ROOT)): page.read_text() for page in PAGES if "_build" not in str(page)
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n*(?:^```output\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
ASKED = re.compile(r"(?:^|-m )linkweave(?:\.bench\.cli)? (.*)$", re.MULTILINE)
MOST_LINES, MOST_WORDS, MOST_IN_A_SENTENCE = 160, 1300, 30


def blocks(language: str) -> list[tuple[str, str, str]]:
    """(page, code, what it prints) of each block in a language."""
    return [
        (page, code, shown)
        for page, text in TEXTS.items()
        for kind, code, shown in FENCE.findall(text)
        if kind == language
    ]


def missing(shown: str, said: str) -> list[str]:
    """The shown lines, but for those that are "...", that do not stand in this order in what was
    said; a shown line may be the beginning of one, and space between words does not count."""
    lines = (" ".join(line.split()) for line in said.splitlines())
    wanted = (" ".join(line.split()) for line in shown.splitlines())
    return [
        line for line in wanted if line != "..." and not any(one.startswith(line) for one in lines)
    ]


@pytest.mark.parametrize(
    ("page", "code", "shown"), blocks("python"), ids=lambda value: str(value)[:20]
)
def test_an_example_runs(page: str, code: str, shown: str, tmp_path: Path) -> None:
    if "torch.cuda" in code or "import cupy" in code:
        compile(code, page, "exec")
        pytest.skip("needs several GPUs")
    script = tmp_path / "example.py"
    script.write_text(code)
    # the README's as a newcomer runs them
    done = run_script_in_a_process(script) if page == "README.md" else run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert missing(shown, done.stdout) == [], done.stdout


@pytest.mark.parametrize(
    ("page", "code", "_"), blocks("console"), ids=lambda value: str(value)[:20]
)
def test_a_command_prints_what_is_shown(
    page: str, code: str, _: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in code.split("$ linkweave ")[1:]:
        words, _, shown = part.partition("\n")
        done = CliRunner().invoke(app, shlex.split(words))
        assert done.exit_code == 0, done.output
        assert missing(shown, done.stdout) == [], done.stdout


def test_every_block_is_of_a_tested_kind() -> None:
    fences = [
        line
        for text in TEXTS.values()
        for line in re.findall(r"^```.*$", text, re.MULTILINE)[::2]
        if not line.startswith("```{")  # a directive of Sphinx
    ]
    # "py": scripts under torchrun, run by test_recipes.py; "ipython": cells, by test_notebook.py
    kinds = "python", "output", "console", "sh", "py", "ipython"
    assert {*fences} == {f"```{kind}" for kind in kinds}


SHELL = {
    words
    for page, code, _ in blocks("sh")
    for words in ASKED.findall(code.replace("\\\n", ""))
    if page != "docs/howto/commands.md"
}


@pytest.mark.parametrize("words", sorted(SHELL))
def test_a_command_of_the_shell_has_its_options(words: str) -> None:
    """Those that need several hosts or take long are not run; their options must exist."""
    command: Any = get_command(app)
    for part in shlex.split(words, comments=True):
        if hasattr(command, "commands"):
            command = command.commands[part]
        elif part.startswith("-"):
            known = [option for one in command.params for option in one.opts]
            assert part.partition("=")[0] in known, part


COMMANDS = re.findall(r"^linkweave (.*)$", TEXTS["docs/howto/commands.md"], re.MULTILINE)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_listed_command_exists(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = shlex.split(words)
    if parts[0] in ("bench", "demo", "predict", "reproduce", "selftest", "what-if"):
        # run elsewhere, smaller
        parts = [*parts[: 2 if parts[0] == "bench" else 1], "--help"]
    elif parts[0] == "schedule":
        parts += ["--limit", "0.2"]  # seconds of searching
    monkeypatch.chdir(tmp_path)
    pairs = (PairFigure(a, b, 1e10, 0.5) for a, b in permutations(range(4), 2))
    (tmp_path / "links.json").write_text(LinkFigures(tuple(pairs)).to_json())
    times = ROOT / "bench/results/algorithms-cpu-4-epyc-2-cores.json"
    (tmp_path / "algorithms.json").write_text(times.read_text())
    (tmp_path / "log.txt").write_text(nccl_tests_log({1 << 20: 60.0, 1 << 24: 400.0}))
    plan = collectives.plan_allreduce(topology.load("dgx1-v100"), 1 << 20)
    (tmp_path / "plan.json").write_text(plan.to_json())
    planned = overlap.plan(overlap.model("vgg16"), overlap.network("10GbE"), "us-byte")
    step = overlap.MeasuredStep(planned, planned.timeline)
    (tmp_path / "step.json").write_text(step.to_json())
    done = CliRunner().invoke(app, parts)
    assert done.exit_code == (1 if "problem " in done.stdout else 0), done.output


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files(page: str) -> None:
    """Sphinx checks what lies within docs/; this checks the README and what leads out of docs/."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page]):
        if not target.startswith(("http", "mailto")):
            assert ((ROOT / page).parent / target).exists(), target
    folders = r"`((?:bench|collectives|kernels|topology|tests|examples)/[\w./-]+)`"
    for path in re.findall(folders, TEXTS[page]):
        assert (ROOT / path).exists(), path


def prose(text: str) -> str:
    """The sentences of a page: no code, tables, headings or pictures."""
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:[|#!].*)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(?:- |\d+\. )", "\n\n", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in prose(text).split("\n\n")]
    return [
        sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.?!])\s", paragraph)
    ]


def test_the_readme_is_short() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= MOST_LINES
    assert len(text.split()) <= MOST_WORDS
    long = [one for one in sentences(text) if len(one.split()) > MOST_IN_A_SENTENCE]
    assert long == []


def test_what_is_shown_must_be_said_in_order() -> None:
    assert missing("a\n...\nc d\n", "a\nb\nc d e\n") == []
    assert missing("c\na\n", "a\nc\n") == ["a"]
    assert sentences("One two. Three `a.b` four.\n- five\n") == [
        "One two.",
        "Three `a.b` four.",
        "five",
    ]
