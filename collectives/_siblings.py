"""linkweave's packages have plain names; another distribution's must not stand in for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def check(names: tuple[str, ...] = ("topology", "kernels", "bench")) -> None:
    """Raise ImportError where `import NAME` would find another project's package."""
    for name in names:
        ours = HOME / name
        spec = find_spec(name)
        where = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
        if not any(w and Path(w).resolve() == ours for w in where):
            found = where[0] if where else "nothing"
            raise ImportError(
                f"`import {name}` finds {found}, but linkweave's own package is {ours}. Another "
                f"distribution uses the name: uninstall it (pip uninstall {name}), use a separate "
                f"environment, or put {HOME} first on PYTHONPATH"
            )


check()
