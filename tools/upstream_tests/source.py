# SPDX-License-Identifier: Apache-2.0
"""The pinned release: its source distribution, for the tests, and its own tree."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

# pip asks the build backend of a source distribution for metadata before it hands the
# file over. Upstream's needs torch; this one, before it on the path, needs nothing.
BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "{name}.dist-info")
    info.mkdir()
    shutil.copy("PKG-INFO", info / "METADATA")
    return info.name
"""


def source_pin() -> tuple[str, str]:
    """Name and sha256 of the source distribution."""
    config = load_config()
    return f"{config['source']['project']}-{config['version']}", config["source"][
        "sha256"
    ]


def find_source() -> Path:
    """The archive, from the cache or fetched by pip.

    Raises:
        OverlayError: pip could not fetch it.
    """
    name, sha256 = source_pin()
    kept = cache_folder() / sha256 / f"{name}.tar.gz"
    if not (kept.is_file() and sha256_of(kept) == sha256):
        print(f"Fetching the source of {name}", file=sys.stderr)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            _pip_download(name, sha256, Path(folder))
            (Path(folder) / kept.name).replace(kept)
    return kept


def _pip_download(name: str, sha256: str, folder: Path) -> None:
    wanted, backend = folder / "source.txt", folder / "path/setuptools/build_meta.py"
    wanted.write_text(f"{name.replace('-', '==')} --hash=sha256:{sha256}\n")
    backend.parent.mkdir(parents=True)
    (backend.parent / "__init__.py").touch()
    backend.write_text(BACKEND.format(name=name))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary=:all:", "--no-build-isolation", "--dest", str(folder)]
    path = {"PYTHONPATH": str(folder / "path")}
    command += ["-r", str(wanted)]
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True
    )
    if done.returncode:
        raise OverlayError(
            f"pip could not fetch the source of {name}:\n{done.stderr}"
            "Check the network and pip's index."
        )


def unpack_source(build: Path) -> Path:
    """All but the package and its metadata: the tree under test has them."""
    name, sha256 = source_pin()
    folder = build / sha256[:16]
    if not folder.exists():
        with tarfile.open(find_source()) as tar, _new(folder) as new:
            members = [m for m in tar if not m.name.startswith(f"{name}/vllm")]
            tar.extractall(new, members, filter="data")
    return folder / name


def unpack_release(build: Path) -> Path:
    """The wheel in a folder that, on the path, is as good as installed."""
    base = pinned_base(target_device())
    folder = build / base.sha256[:16]
    if not folder.exists():
        with ZipFile(find_wheel(base)) as wheel, _new(folder) as new:
            wheel.extractall(new)
            _name_vllm(new, base.version + ("+cpu" if base.device == "cpu" else ""))
    return folder


def _name_vllm(tree: Path, version: str) -> None:
    """vLLM asks for the version of `vllm`, and takes the CPU where `cpu` is in it."""
    (info,) = tree.glob("*.dist-info")
    info = info.rename(tree / f"vllm-{version}.dist-info")
    headers = (info / "METADATA").read_text()
    for key, value in (("Name", "vllm"), ("Version", version)):
        headers = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", headers, count=1)
    (info / "METADATA").write_text(headers)


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
        (new := Path(whole) / "new").mkdir()
        yield new
        new.rename(folder)
