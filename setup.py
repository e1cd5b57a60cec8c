# SPDX-License-Identifier: Apache-2.0
"""Builds the package: the pinned release of vLLM with this repository's vllm/ in it.

Environment variables:
    VLLM_TARGET_DEVICE: cpu or cuda; unset, cuda where there is an NVIDIA driver.
    VLLM_BASE_WHEEL: the release's wheel at hand, used instead of fetching it.
    VLLM_KERNELS_WHEEL: the same for the wheel of a CPU's kernels.
    VLLM_BASE_CACHE: folder for fetched wheels.
    VLLM_ALLOW_CHANGED_MEMBERS: 1 composes over a release that edits.lock is not of.
"""

import os
import re
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from overlay import base  # noqa: E402
from overlay.compose import EDITABLE, compose_for  # noqa: E402

LICENCES = ROOT / "build" / "vllm-base"  # see license-files in pyproject.toml


class Compose(build_py):
    """Composes the package of a wheel in place of copying it."""

    def run(self) -> None:
        if not self.editable_mode:
            compose_for(base.target_device(), tree := Path(self.build_lib))
            shutil.rmtree(tree / "info")

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in has them


class Editable(editable_wheel):
    """Composes the tree first: what goes wrong in `build_py` it would not tell."""

    def run(self) -> None:
        compose_for(base.target_device(), EDITABLE, link=True)
        super().run()


class Wheel(bdist_wheel):
    """A wheel for the Python and the platforms that its compiled kernels are for."""

    def get_tag(self) -> tuple[str, ...]:
        pinned = base.pinned_base(base.target_device())
        wheel = base.find_wheel(pinned.kernels or pinned)
        return tuple(wheel.stem.split("-")[-3:])

    def egg2dist(self, egginfo: str, distinfo: str) -> None:
        super().egg2dist(egginfo, distinfo)
        for file in filter(Path.is_file, Path(distinfo).rglob("*")):
            file.chmod(0o644)  # whatever the licences' are here


class Composed(Distribution):
    def has_ext_modules(self) -> bool:
        return True


def requirements(device: str) -> list[str]:
    """Of every device, and of this one, whose file includes the others by `-r`."""
    files = (ROOT / f"requirements/{name}.txt" for name in ("common", device))
    lines = (line for file in files for line in file.read_text().splitlines())
    found = (line.partition("#")[0].strip() for line in lines)
    return [line for line in found if line and not line.startswith("-r")]


def of_release(wheel: Path) -> dict[str, dict[str, list[str]]]:
    """Extras and entry points of the release."""
    (release,) = distributions(path=[str(wheel)])
    extras = {extra: [] for extra in release.metadata.get_all("Provides-Extra", [])}
    for line in release.requires:
        if found := re.fullmatch(r'(.*?)\s*;\s*extra == "([^"]*)"', line):
            extras[found[2]].append(found[1])
    points: dict[str, list[str]] = {}
    for point in release.entry_points:
        points.setdefault(point.group, []).append(f"{point.name} = {point.value}")
    return {"extras_require": extras, "entry_points": points}


def put_licences(wheel: Path) -> None:
    shutil.rmtree(LICENCES, ignore_errors=True)
    LICENCES.mkdir(parents=True)
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/licenses/" in name and not name.endswith("/"):
                (LICENCES / Path(name).name).write_bytes(archive.read(name))


try:
    os.umask(0o022)  # of the files of a wheel, whoever builds it
    device, wheel = base.target_device(), base.pinned_wheel()
    put_licences(wheel)
    setup(
        version=base.local_version(base.pinned_base(device)),
        install_requires=requirements(device),
        distclass=Composed,
        cmdclass={
            "build_py": Compose,
            "editable_wheel": Editable,
            "bdist_wheel": Wheel,
        },
        options={
            "egg_info": {"egg_base": "build"},
            "build": {"build_base": "build/setuptools"},
        },
        **of_release(wheel),
    )
except base.OverlayError as error:
    raise SystemExit(f"error: {error}") from None
