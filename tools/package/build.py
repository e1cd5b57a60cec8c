# SPDX-License-Identifier: Apache-2.0
"""Builds wheels so that the same inputs give the same bytes.

The inputs are the repository's files, the base wheel that `base.toml` pins, the build
tools that `requirements/build.txt` pins, `SOURCE_DATE_EPOCH`, and from the machine its
type, its zlib and, for the CPU, its C++ compiler.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import ROOT, OverlayError, sha256_of

EPOCH = "1580601600"  # hatchling's own, 2020-02-02: what is in a wheel has no date


@dataclass(frozen=True)
class Surroundings:
    """What differs from one builder to the next, and must not show in a wheel."""

    folder: str
    umask: int = 0o022
    env: tuple[tuple[str, str], ...] = ()


HERE = Surroundings("tree")
ELSEWHERE = Surroundings(
    "another/tree with spaces",
    umask=0o077,
    env=(("TZ", "Pacific/Chatham"), ("LC_ALL", "C"), ("PYTHONHASHSEED", "7")),
)


def build_wheel(device: str, output: Path, root: Path = ROOT) -> Path:
    """Builds the wheel of a device from the tree at `root`.

    Raises:
        OverlayError: pip could not build it; the message has what pip said.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _build(device, root, output, Path(folder), HERE)


def reproduce(device: str, output: Path, root: Path = ROOT) -> Path:
    """Builds a wheel twice in different surroundings and keeps it if they are equal.

    Only what git would commit is there to build from.

    Raises:
        OverlayError: a build failed, or the wheels differ; it says where.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, wheels = Path(name), []
        source = folder / "source"  # taken once: the tree may be worked on meanwhile
        copy_tree(root, source)
        for number, around in enumerate((HERE, ELSEWHERE)):
            tree = folder / around.folder
            shutil.copytree(source, tree)
            wheels.append(_build(device, tree, folder / str(number), folder, around))
            shutil.rmtree(tree)
        if sha256_of(wheels[0]) != sha256_of(wheels[1]):
            parts = ", ".join(differing(*wheels)) or "only the archives themselves"
            raise OverlayError(f"Two builds of {wheels[0].name} differ: {parts}.")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheels[0], output / wheels[0].name))


def _build(
    device: str, tree: Path, output: Path, scratch: Path, around: Surroundings
) -> Path:
    pins = str(ROOT / "requirements" / "build.txt")
    fresh = tempfile.mkdtemp(dir=scratch)  # pip's scratch: each build has its own
    env = {
        **os.environ,
        **dict(around.env),
        "VLLM_TARGET_DEVICE": device,
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", EPOCH),
        "PIP_CONSTRAINT": pins,  # up to pip 25.2
        "PIP_BUILD_CONSTRAINT": pins,  # from pip 25.3 on
        "TMPDIR": fresh,
    }
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(target), str(tree)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, umask=around.umask
    )
    if done.returncode:
        raise OverlayError(f"pip could not build the wheel:\n{done.stderr.strip()}")
    (wheel,) = target.glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, output / wheel.name))


def copy_tree(root: Path, target: Path) -> None:
    """The files of the working tree that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True)
    for name in filter(None, done.stdout.decode().split("\0")):
        if (root / name).is_file():  # else deleted, and not yet committed
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, place)


def differing(first: Path, second: Path) -> list[str]:
    """The entries in which two wheels differ, by content or in what zip says."""
    sides = []
    for path in (first, second):
        with ZipFile(path) as wheel:
            sides.append({i.filename: entry(wheel, i) for i in wheel.infolist()})
    names = sides[0].keys() | sides[1].keys()
    return sorted(name for name in names if sides[0].get(name) != sides[1].get(name))


def entry(wheel: ZipFile, info) -> tuple:
    with wheel.open(info) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, info.date_time, info.external_attr, info.compress_type
