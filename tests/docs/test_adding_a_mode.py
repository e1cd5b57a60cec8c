# SPDX-License-Identifier: Apache-2.0
"""The edits of the page on adding a draft mode, made in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from tools.docs import DOCS, ROOT
from tools.docs.pages import Fence, fences
from tools.overlay.native import build, compiler

PACKAGE = "vllm/v1/worker/gpu/spec_decode/unified"
TEST = "tests/v1/worker/gpu/spec_decode/test_unified_inputs.py"
CAN_BUILD = compiler() is not None and shutil.which("cmake") is not None
KERNELS = ["triton", "native"] if CAN_BUILD else ["triton"]
EDITS = [f for f in fences(DOCS / "adding-a-mode.md") if f.info.startswith("diff")]


def apply(edit: Fence, root: Path) -> None:
    """Makes the one change that a diff of the page shows."""
    (path,) = re.findall(r'title="(.+)"', edit.info)
    old, new = (
        "".join(line[1:] for line in edit.body.splitlines(True) if line[0] != skipped)
        for skipped in "+-"
    )
    text = (root / path).read_text()
    assert text.count(old) == 1, f"{edit.where}: its old lines are not in {path} once"
    (root / path).write_text(text.replace(old, new))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree, and what is installed of it with the unified speculator as files."""
    for folder in (PACKAGE, "csrc", Path(TEST).parent, "tools/overlay"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("CMakeLists.txt", "pyproject.toml", "base.toml", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run_kernel_tests(copy: Path) -> subprocess.CompletedProcess:
    """Kernels against reference, in the tree that `make env` would compose."""
    site = copy / "site"
    installed = Path(vllm.__file__).parent
    shutil.copytree(installed, site / "vllm", copy_function=os.symlink)
    shutil.rmtree(site / PACKAGE)
    shutil.move(copy / PACKAGE, site / PACKAGE)
    shutil.rmtree(copy / "vllm")
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    env["VLLM_TEST_EXAMPLES"] = "20"  # of many: here it is the page that is tested
    write = [sys.executable, "csrc/write_structs.py"]
    subprocess.run(write, cwd=copy, env=env, check=True)
    assert not CAN_BUILD or build(site, copy) is None
    which = f"equals_reference and ({' or '.join(KERNELS)})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
    return subprocess.run(
        [*command, "-k", which], cwd=copy, env=env, capture_output=True, text=True
    )


def test_the_page_works(copy: Path):
    assert len(EDITS) == 9
    for edit in EDITS:
        apply(edit, copy)
    done = run_kernel_tests(copy)
    assert done.returncode == 0, done.stdout
    assert f"{len(KERNELS)} passed" in done.stdout
