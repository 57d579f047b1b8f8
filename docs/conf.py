"""Settings of Sphinx for linkweave's documentation (`make docs`)."""

import re
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.util.nodes import make_refnode

project = "linkweave"
author = "the linkweave authors"
copyright = author
release = version_of("linkweave")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"linkweave {release}"
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # blocks of output have no language
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpicky = True  # types that no page documents: those of other packages, and a few of our own
nitpick_ignore_regex = [
    ("py:class", r"(collections\.abc|fractions|nn|numpy|os|pathlib|torch)\..*"),
    ("py:class", r".*\.(Arena|GpuId|HostCalls|Machines|Piece|Row|Settings|Sparse|Step)"),
    ("py:class", r".*\.(Team|Way)"),
]


def _commands() -> str:
    """The help of each command, as `--help` prints it."""
    from typer.testing import CliRunner

    from linkweave.bench.command.cli import app, bench

    names = [[c.name or c.callback.__name__.replace("_", "-")] for c in app.registered_commands]
    names += [["bench", c.name or c.callback.__name__.replace("_", "-")]
              for c in bench.registered_commands]  # fmt: skip
    asked = partial(CliRunner().invoke, app, prog_name="linkweave")
    return "\n\n\n".join(asked([*words, "--help"]).stdout.strip() for words in names)


(Path(__file__).parent / "reference" / "command.inc").write_text(_commands() + "\n")


def _paragraphs(lines: list[str]) -> list[str]:
    """A docstring, which is plain text, as reStructuredText.

    A paragraph in which some lines are indented is a list, whose entries begin at the others.
    """
    made = []
    for paragraph in "\n".join(lines).split("\n\n"):
        if paragraph[:1] == " ":
            made += ["::", "", *(f"   {line}" for line in paragraph.split("\n")), ""]
            continue
        entries = re.sub(r"\n +", " ", paragraph).split("\n")
        if "\n " in paragraph:
            made += [f"- {_inline(entry)}" for entry in entries]
        else:
            made.append(_inline(" ".join(entries)))
        made.append("")
    return made


def _inline(text: str) -> str:
    """Code between single backticks as reStructuredText has it; nothing else means anything."""
    parts = [re.sub(r"([\\*|_])", r"\\\1", part) for part in text.split("`")]
    code = text.split("`")
    parts[1::2] = [f"``{part}``\\ " for part in code[1::2]]
    return "".join(parts)


def setup(app):
    def plain(_app, _what, _name, _obj, _options, lines):
        lines[:] = _paragraphs(lines)

    def elsewhere(_app, env, node, text):
        """A class is documented under the module that exports it; types name the one it lies in."""
        name = node["reftarget"].rpartition(".")[2]
        for full, found in env.domains["py"].data["objects"].items():
            if full.rpartition(".")[2] == name and found.objtype == "class":
                at = found.docname, found.node_id
                return make_refnode(_app.builder, node["refdoc"], *at, text)
        return None

    app.connect("autodoc-process-docstring", plain)
    app.connect("missing-reference", elsewhere)
