# SPDX-License-Identifier: Apache-2.0
"""Installing with pip, from a source distribution and editable, and uninstalling."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from tests.overlay.fakes import PLATFORM, addition, edit, write_overlay, write_wheel
from tools.overlay.base import ROOT
from tools.overlay.native import compiler

PART, NEW = "vllm/part.py", "vllm/new.py"
RELEASE = {PART: "def say():\n    return 'upstream'\n"}
EDIT = "@@ imports\nfrom vllm.new import ours\n@@ say, before line 1\n@ours\n"
OVERLAY = {
    f"{PART}.edit": edit(EDIT),
    NEW: addition("def ours(say):\n    return lambda: 'ours over ' + say()\n"),
}
SAY = (
    "python",
    "-P",
    "-c",
    "import vllm.part; print(vllm.part.say(), vllm.__version__)",
)
INFO = "vllm-1.0.0+fake.1.cpu.dist-info"


@dataclass
class Install:
    """A repository over a small release, and an environment to install it to."""

    root: Path
    venv: Path
    wheel: Path

    def run(self, *command: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_BASE_WHEEL": str(self.wheel),
            "SOURCE_DATE_EPOCH": "1580601600",
        }
        environment.pop("PYTHONPATH", None)
        return subprocess.run(
            command,
            env=environment,
            cwd=self.root,
            umask=0o077,  # must not affect file modes
            capture_output=True,
            text=True,
        )

    def pip(self, *args: str, fails: bool = False) -> str:
        """Runs pip for the environment; returns its messages."""
        python = str(self.venv / "bin/python")
        pip = (sys.executable, "-m", "pip", "--python", python)
        done = self.run(*pip, *args, "--quiet")
        assert bool(done.returncode) == fails, done.stderr
        return done.stderr

    def files(self) -> set[Path]:
        found = (path for path in self.venv.rglob("*") if path.is_file())
        return {path for path in found if path.parent.name != "__pycache__"}

    def output(self, *command: str) -> str:
        done = self.run(str(self.venv / "bin" / command[0]), *command[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def prepare(folder: Path) -> Install:
    """A copy of the files that a build needs, over a small release; an empty venv."""
    wheel = write_wheel(folder, RELEASE)
    root = folder / "repo"
    for name in ("tools/overlay", "requirements", "csrc"):
        shutil.copytree(ROOT / name, root / name)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in ("base.toml", "edits.lock"):
            shutil.copy(path, root)
    write_overlay(root, OVERLAY, wheel)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    return Install(root, venv, wheel)


def test_wheel_from_source_distribution(tmp_path):
    install = prepare(tmp_path)
    command = ("setup.py", "--quiet", "sdist", "--dist-dir", "dist")
    done = install.run(sys.executable, *command)
    assert done.returncode == 0, done.stderr
    (sdist,) = (install.root / "dist").glob("*.tar.gz")
    install.pip("wheel", "--no-deps", "--wheel-dir", "dist", str(sdist))
    (wheel,) = (install.root / "dist").glob("*.whl")
    before = install.files()
    install.pip("install", "--no-deps", str(wheel))
    assert install.output(*SAY) == "ours over upstream 1.0.0+fake.1.cpu"
    assert install.output("vllm") == "the command ran"
    install.pip("uninstall", "--yes", "vllm")
    assert install.files() == before
    check_contents(wheel)


def check_contents(wheel: Path) -> None:
    """It has additions, edited files and native kernels: readable, with one date."""
    assert wheel.stem.endswith(PLATFORM)
    with ZipFile(wheel) as archive:
        entries = archive.infolist()
        headers = message_from_bytes(archive.read(f"{INFO}/METADATA"))
        points = archive.read(f"{INFO}/entry_points.txt").decode()
    names = {entry.filename for entry in entries}
    assert {PART, NEW, "vllm/cli.py"} <= names
    assert sum(n.endswith("_tree_attention.so") for n in names) == bool(compiler())
    for name in ("LICENSE", "NOTICE", "build/vllm-base/LICENSE"):
        assert f"{INFO}/licenses/{name}" in names
    assert not [n for n in names if n.endswith((".edit", ".json", ".pyc"))]
    modes = {stat.S_IMODE(e.external_attr >> 16) for e in entries}
    assert modes <= {0o644, 0o664}  # the latter is what `wheel` gives RECORD
    assert {e.date_time for e in entries} == {(2020, 2, 2, 0, 0, 0)}
    assert headers["Version"] == "1.0.0+fake.1.cpu"
    assert headers["License-Expression"] == "Apache-2.0"
    assert headers.get_all("Provides-Extra") == ["audio"]
    wanted = set(map(str, map(Requirement, headers.get_all("Requires-Dist"))))
    assert wanted == {"numpy", "torch==2.13.0", 'scipy; extra == "audio"'}
    assert "[vllm.general_plugins]\nplugin = vllm.cli:main\n" in points
