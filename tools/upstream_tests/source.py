# SPDX-License-Identifier: Apache-2.0
"""The pinned release: its source distribution, for the tests, and its wheel."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.overlay.base import (
    Base,
    cached,
    fetch,
    load_config,
    pinned_base,
    target_device,
)
from tools.overlay.compose import unpack_install

# pip asks the build backend of a source distribution for metadata even if it only
# downloads it. Upstream's needs torch; this one, before it on the path, needs nothing.
BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "{name}.dist-info")
    info.mkdir()
    shutil.copy("PKG-INFO", info / "METADATA")
    return info.name
"""


def source_pin() -> Base:
    """The pinned source distribution."""
    config = load_config()
    return Base(version=config["version"], device="any", **config["source"])


def fetch_source(base: Base, name: str) -> Path:
    """Fetches the source distribution; raises OverlayError."""
    with tempfile.TemporaryDirectory() as folder:
        backend = Path(folder, "setuptools/build_meta.py")
        backend.parent.mkdir()
        (backend.parent / "__init__.py").touch()
        backend.write_text(BACKEND.format(name=name))
        return fetch(base, "--no-binary=:all:", PYTHONPATH=folder)


def unpack_source(build: Path) -> Path:
    """Unpacks all but the package and its metadata, which the tree under test has."""
    base = source_pin()
    folder, name = build / base.sha256[:16], f"{base.project}-{base.version}"
    if not folder.exists():
        archive = cached(base) or fetch_source(base, name)
        with _new_folder(folder) as new:
            shutil.unpack_archive(archive, new, "gztar", filter="data")
            for path in (new / name).glob("vllm*"):
                shutil.rmtree(path)
    return folder / name


def unpack_release(build: Path) -> Path:
    """Unpacks the wheel to a folder that works like an install if on the path."""
    base = pinned_base(target_device())
    folder = build / base.sha256[:16]
    if not folder.exists():
        with _new_folder(folder) as new:
            unpack_install(base, new)
    return folder


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to `folder` when complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
        new = Path(whole, "new")
        yield new
        new.rename(folder)
