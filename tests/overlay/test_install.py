# SPDX-License-Identifier: Apache-2.0
"""Installing with pip from a source distribution, and uninstalling."""

import shutil
import stat
import subprocess
import sys
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
SAY = "import vllm.part; print(vllm.part.say(), vllm.__version__)"
INFO = "vllm-1.0.0+fake.1.cpu.dist-info"


def prepare(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """A copy of the files that a build needs, over a release; an empty environment."""
    root, venv = folder / "repo", folder / "venv"
    for name in ("tools/overlay", "requirements", "csrc"):
        shutil.copytree(ROOT / name, root / name)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in ("base.toml", "edits.lock"):
            shutil.copy(path, root)
    write_overlay(root, OVERLAY, wheel)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    return root, venv


def files_of(venv: Path) -> set[Path]:
    found = (path for path in venv.rglob("*") if path.is_file())
    return {path for path in found if path.parent.name != "__pycache__"}


def test_wheel_from_source_distribution(tmp_path, monkeypatch):
    release = write_wheel(tmp_path, RELEASE)
    root, venv = prepare(tmp_path, release)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_BASE_WHEEL", str(release))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1580601600")
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(*command: str | Path) -> str:
        how = {"cwd": root, "umask": 0o077}  # which must not affect file modes
        done = subprocess.run(command, **how, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pip(*words: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", venv / "bin/python", *words, "-q")

    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", "dist")
    (sdist,) = (root / "dist").glob("*.tar.gz")
    pip("wheel", "--no-deps", "--wheel-dir", "dist", sdist)
    (wheel,) = (root / "dist").glob("*.whl")
    before = files_of(venv)
    pip("install", "--no-deps", wheel)
    said = run(venv / "bin/python", "-P", "-c", SAY)
    assert said == "ours over upstream 1.0.0+fake.1.cpu"
    assert run(venv / "bin/vllm") == "the command ran"
    pip("uninstall", "--yes", "vllm")
    assert files_of(venv) == before
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
