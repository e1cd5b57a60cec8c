# SPDX-License-Identifier: Apache-2.0
"""The pinned release: its source distribution, for the tests, and its wheel."""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
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


def unpack_source(build: Path) -> Path:
    """Unpacks all but the package and its metadata, which the tree under test has."""
    config = load_config()
    base = Base(version=config["version"], device="any", **config["source"])
    name = f"{base.project}-{base.version}"

    def fill(folder: Path) -> None:
        archive = cached(base) or fetch_source(base, name)
        shutil.unpack_archive(archive, folder, "gztar", filter="data")
        for path in (folder / name).glob("vllm*"):
            shutil.rmtree(path)

    return filled(build / base.sha256[:16], fill) / name


def fetch_source(base: Base, name: str) -> Path:
    """Fetches the source distribution; raises OverlayError."""
    with tempfile.TemporaryDirectory() as folder:
        backend = Path(folder, "setuptools/build_meta.py")
        backend.parent.mkdir()
        (backend.parent / "__init__.py").touch()
        backend.write_text(BACKEND.format(name=name))
        return fetch(base, "--no-binary=:all:", PYTHONPATH=folder)


def unpack_release(build: Path) -> Path:
    """Unpacks the wheel to a folder that works like an install if on the path."""
    base = pinned_base(target_device())
    return filled(build / base.sha256[:16], partial(unpack_install, base))


def filled(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The folder, which `fill` makes if there is none; all of it or nothing."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
            fill(new := Path(whole, "new"))
            new.rename(folder)
    return folder
