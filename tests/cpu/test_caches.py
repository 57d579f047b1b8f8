"""Where compilers keep what they have made, if their own folders cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numba
import pytest

from linkweave.kernels import caches

NAMES = ["NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR"]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user without a home, who has not installed the package."""
    (tmp_path / "file").touch()  # where nobody makes a folder, not even root
    for name in (*NAMES, "XDG_CACHE_HOME", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file/home"))
    monkeypatch.setattr(caches, "HERE", tmp_path / "file/__pycache__")
    monkeypatch.setattr(caches, "temporary", lambda: tmp_path / "temporary")
    with mock.patch.dict(os.environ):  # later tests would compile everything anew
        yield tmp_path
    monkeypatch.undo()
    numba.config.reload_config()


def test_where_nothing_can_be_written_folders_are_temporary(nowhere: Path) -> None:
    assert caches.use_writable() == NAMES
    assert [os.environ[name] for name in NAMES] == [
        str(nowhere / "temporary" / name) for name in ("numba", "triton", "cupy")
    ]
    assert str(nowhere / "temporary/numba") == numba.config.CACHE_DIR
    assert caches.folder() == nowhere / "temporary/cuda"
    assert caches.use_writable() == []


def test_a_folder_that_is_named_or_can_be_written_stays(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere / "new"))
    assert caches.use_writable() == ["CUPY_CACHE_DIR"]
    assert caches.folder() == nowhere / "new/linkweave"


def test_a_folder_that_is_closed_to_this_user_cannot_be_written(tmp_path: Path) -> None:
    """As root's home, which a container may name to another user."""
    tmp_path.chmod(0)
    try:
        assert caches._writable(tmp_path / "home/.cache") == (os.geteuid() == 0)
    finally:
        tmp_path.chmod(0o700)


def test_a_temporary_folder_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever can write it decides what we run."""
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    find = caches.temporary.__wrapped__
    assert find() == find() == tmp_path / f"linkweave-{os.geteuid()}"
    find().chmod(0o777)
    other = find()
    assert other.parent == tmp_path and other != tmp_path / f"linkweave-{os.geteuid()}"
    assert other.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    (tmp_path / "linkweave-5").touch()
    assert find().is_dir()
