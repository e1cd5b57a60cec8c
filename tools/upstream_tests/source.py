# SPDX-License-Identifier: Apache-2.0
"""The pinned release's source distribution, for its tests, and its unpacked wheel."""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import (
    OverlayError,
    cache_folder,
    find_wheel,
    load_config,
    pinned_base,
    sha256_of,
    target_device,
)
from tools.overlay.trial import give_metadata

# pip asks a source distribution's build backend for metadata before it hands the file
# over. Upstream's would need torch and a compiler, so this one stands before it on the
# path; the metadata are in the distribution.
BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "{name}.dist-info")
    info.mkdir()
    shutil.copy("PKG-INFO", info / "METADATA")
    return info.name
"""


@dataclass(frozen=True)
class Source:
    """One source distribution, as `[source]` of base.toml names it."""

    project: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.project}-{self.version}"


def pinned_source() -> Source:
    config = load_config()
    return Source(version=config["version"], **config["source"])


def find_archive(source: Source) -> Path:
    """The archive, from the cache or fetched by pip.

    Raises:
        OverlayError: pip could not fetch it.
    """
    kept = cache_folder() / source.sha256 / f"{source.name}.tar.gz"
    if not (kept.is_file() and sha256_of(kept) == source.sha256):
        print(f"Fetching the source of {source.name}", file=sys.stderr)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            _pip_download(source, Path(folder))
            (Path(folder) / kept.name).replace(kept)
    return kept


def _pip_download(source: Source, folder: Path) -> None:
    wanted, backend = folder / "source.txt", folder / "path/setuptools/build_meta.py"
    wanted.write_text(
        f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n"
    )
    backend.parent.mkdir(parents=True)
    (backend.parent / "__init__.py").touch()
    backend.write_text(BACKEND.format(name=source.name))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary=:all:", "--no-build-isolation", "--dest", str(folder)]
    result = subprocess.run(
        [*command, "-r", str(wanted)],
        env={**os.environ, "PYTHONPATH": str(folder / "path")},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise OverlayError(
            f"pip could not fetch the source of {source.name}:\n{result.stderr}"
            "Check the network and pip's index."
        )


def pins() -> list[str]:
    """What the release's results depend on, as base.toml has it."""
    return [pinned_source().sha256, str(pinned_base(target_device()).sha256)]


def unpack_source(build: Path) -> Path:
    """Unpacks all but the package itself: `vllm` comes from the tree under test."""
    source = pinned_source()
    folder = build / source.sha256[:16]
    if not folder.exists():
        with tarfile.open(find_archive(source)) as tar, _new(folder) as new:
            package = f"{source.name}/vllm/"
            members = [m for m in tar if not m.name.startswith(package)]
            tar.extractall(new, members, filter="data")
    return folder / source.name


def unpack_release(build: Path) -> Path:
    """The release's wheel in a folder that, on the path, is as good as installed."""
    base = pinned_base(target_device())
    folder = build / base.sha256[:16]
    if not folder.exists():
        with ZipFile(find_wheel(base)) as wheel, _new(folder) as new:
            wheel.extractall(new)
            (info,) = new.glob("*.dist-info")
            info.rename(new / "info")
            give_metadata(new, base.version)
    return folder


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
        (new := Path(whole) / "new").mkdir()
        yield new
        new.rename(folder)
