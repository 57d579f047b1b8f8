"""What Triton needs of the host."""

from __future__ import annotations

import importlib


def check_triton() -> None:
    """Raise RuntimeError if this process cannot launch Triton's kernels.

    Before the first launch Triton compiles C against Python's headers, unless its cache has the
    result; images of containers often lack a compiler. This does it now.
    """
    try:
        _ = importlib.import_module("triton").runtime.driver.active
    except Exception as error:  # of subprocess, of the file system, or of Triton's own
        raise RuntimeError(
            f"Triton cannot launch kernels here: {error}. It compiles C once: install a C "
            "compiler (gcc) and the headers of Python (python3-dev)"
        ) from error
