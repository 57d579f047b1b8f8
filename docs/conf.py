"""Settings of Sphinx for linkweave's documentation (`make docs`)."""

from importlib.metadata import version as version_of
from pathlib import Path

project = "linkweave"
author = "the linkweave authors"
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


def _commands() -> str:
    """The help of each command, as `--help` prints it."""
    from typer.testing import CliRunner

    from linkweave.bench.cli import app, bench

    names = [[c.name or c.callback.__name__.replace("_", "-")] for c in app.registered_commands]
    names += [["bench", c.name or c.callback.__name__.replace("_", "-")]
              for c in bench.registered_commands]  # fmt: skip
    helps = (CliRunner().invoke(app, [*words, "--help"]).stdout.strip() for words in names)
    return "\n\n\n".join(helps)


(Path(__file__).parent / "reference" / "command.inc").write_text(_commands() + "\n")


def setup(app):
    """Docstrings are plain text, as `help` prints them."""

    def literal(_app, _what, _name, _obj, _options, lines):
        if lines:
            lines[:] = ["::", "", *(f"   {line}" for line in lines), ""]

    app.connect("autodoc-process-docstring", literal)
