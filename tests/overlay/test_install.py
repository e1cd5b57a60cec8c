# SPDX-License-Identifier: Apache-2.0
"""Installing with pip, plain and editable, over a small base, and uninstalling."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.overlay.fakes import PLATFORM, seam, write_overlay, write_wheel
from tools.overlay.base import ROOT
from tools.overlay.native import compiler

PART = "vllm/part.py"
SAY = "\ndef say():\n    return 'ours over ' + upstream.say()\n"
BASE = {PART: "def say():\n    return 'upstream'\n"}


@dataclass
class Install:
    root: Path
    venv: Path
    wheel: Path

    def pip(self, *args: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_BASE_WHEEL": str(self.wheel),
        }
        environment.pop("PYTHONPATH", None)
        python = str(self.venv / "bin/python")
        command = [sys.executable, "-m", "pip", "--python", python, *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def install(self, *args: str) -> "Install":
        done = self.pip("install", "--no-deps", "--quiet", *args)
        assert done.returncode == 0, done.stderr
        return self

    def uninstall(self) -> None:
        assert self.pip("uninstall", "--yes", "vllm").returncode == 0

    def files(self) -> set[Path]:
        found = (path for path in self.venv.rglob("*") if path.is_file())
        return {path for path in found if path.parent.name != "__pycache__"}

    def output(self, *command: str) -> str:
        command = (str(self.venv / "bin" / command[0]), *command[1:])
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.venv)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def distribution(self) -> Distribution:
        (folder,) = self.venv.glob("lib/python*/site-packages")
        (found,) = [d for d in distributions(path=[str(folder)]) if d.name == "vllm"]
        return found


def prepare(folder: Path) -> Install:
    """A copy of what a build needs, pinned to a small base, and an empty venv."""
    wheel = write_wheel(folder, BASE)
    root = write_overlay(folder / "repo", {PART: seam(PART, SAY)}, wheel)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in ("base.toml", "seams.lock"):
            shutil.copy(path, root)
    for name in ("tools/overlay", "requirements", "csrc"):
        shutil.copytree(ROOT / name, root / name, dirs_exist_ok=True)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    return Install(root, venv, wheel)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    install = prepare(tmp_path_factory.mktemp("install"))
    before = install.files()
    yield install.install(str(install.root))
    install.uninstall()
    assert install.files() == before


def test_modules(installed):
    code = "import vllm.part; print(vllm.part.say(), vllm.__version__)"
    assert installed.output("python", "-c", code) == (
        "ours over upstream 1.0.0+fake.1.cpu"
    )


def test_entry_points(installed):
    assert installed.output("vllm") == "the command ran"
    (plugin,) = [
        point
        for point in installed.distribution().entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert (plugin.name, plugin.value) == ("plugin", "vllm.cli:main")


def test_native_kernel(installed):
    names = [path.name for path in installed.distribution().files]
    assert names.count("_prepare_inputs.so") == (compiler() is not None)


def test_licences(installed):
    files = {str(path) for path in installed.distribution().files}
    folder = "vllm-1.0.0+fake.1.cpu.dist-info/licenses"
    for name in ("LICENSE", "NOTICE", "build/vllm-base/LICENSE"):
        assert f"{folder}/{name}" in files


def test_metadata(installed):
    found = installed.distribution()
    assert found.version == "1.0.0+fake.1.cpu"
    assert f"Tag: {PLATFORM}" in found.read_text("WHEEL")
    assert found.metadata.get_all("Provides-Extra") == ["audio"]
    wanted = {Requirement(line) for line in found.requires}
    assert Requirement('scipy; extra == "audio"') in wanted
    names = {requirement.name for requirement in wanted}
    assert "torch" in names
    assert not names & {"torchvision", "torchaudio", "torchcodec"}


def test_wrong_base_is_one_clear_error(installed, tmp_path):
    other = write_wheel(tmp_path, {**BASE, PART: "def say(): pass\n"})
    failing = Install(installed.root, installed.venv, other)
    done = failing.pip("install", "--no-deps", str(installed.root))
    assert done.returncode
    assert f"error: {other.name} is not the pinned base" in done.stderr
    assert 'File "' not in done.stderr


def test_editable(tmp_path):
    install = prepare(tmp_path)
    before = install.files()
    install.install("--editable", str(install.root))
    command = ("python", "-c", "import vllm.part; print(vllm.part.say())")
    assert install.output(*command) == "ours over upstream"
    source = install.root / PART
    source.write_text(source.read_text().replace("ours", "edited"))
    assert install.output(*command) == "edited over upstream"
    assert install.output("vllm") == "the command ran"
    libraries = list((install.root / "build/editable").rglob("_prepare_inputs.so"))
    assert len(libraries) == (compiler() is not None)
    install.uninstall()
    assert install.files() == before
