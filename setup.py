# SPDX-License-Identifier: Apache-2.0
"""Builds the package: the pinned release of vLLM with this repository's vllm/ in it.

Environment variables:
    VLLM_TARGET_DEVICE: cpu or cuda; unset, cuda where there is an NVIDIA driver.
    VLLM_BASE_WHEEL: the release's wheel at hand, used instead of fetching it.
    VLLM_BASE_CACHE: folder for fetched wheels.
    VLLM_ALLOW_CHANGED_MEMBERS: 1 composes over a release that edits.lock is not of.
"""

import os
import re
import shutil
import sys
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from overlay.base import (  # noqa: E402
    OverlayError,
    local_version,
    pinned_base,
    pinned_wheel,
    target_device,
)
from overlay.compose import EDITABLE, compose_for  # noqa: E402
from overlay.native import build_requirements  # noqa: E402

LICENCES = ROOT / "build" / "vllm-base"  # see license-files in pyproject.toml


class Compose(build_py):
    """Composes the package of a wheel in place of copying it."""

    def run(self) -> None:
        if not self.editable_mode:
            tree = Path(self.build_lib)
            compose_for(target_device(), tree)
            shutil.rmtree(tree / "info")

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in has them

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Editable(editable_wheel):
    """Composes the tree first: what goes wrong in `build_py` it would not tell."""

    def run(self) -> None:
        compose_for(target_device(), EDITABLE, link=True)
        super().run()


class Wheel(bdist_wheel):
    """A wheel for the Python and the platforms that the release's wheel is for."""

    def run(self) -> None:
        super().run()
        shutil.rmtree(self.get_finalized_command("build").build_lib)

    def get_tag(self) -> tuple[str, ...]:
        return tuple(pinned_wheel().stem.split("-")[-3:])

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


def of_release() -> dict:
    """Extras and entry points of the release's wheel; its licences are put in place."""
    with ZipFile(pinned_wheel()) as wheel:
        (info,) = {n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
        headers = message_from_string(wheel.read(f"{info}/METADATA").decode())
        points = ConfigParser(delimiters="=")
        points.optionxform = str  # names keep their case
        points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        for name in wheel.namelist():
            if name.startswith(f"{info}/licenses/") and not name.endswith("/"):
                (LICENCES / Path(name).name).write_bytes(wheel.read(name))
    extras = {extra: [] for extra in headers.get_all("Provides-Extra", [])}
    for line in headers.get_all("Requires-Dist", []):
        if found := re.fullmatch(r'(.*?)\s*;\s*extra == "([^"]*)"', line):
            extras[found[2]].append(found[1])
    return {
        "extras_require": extras,
        "entry_points": {
            group: [f"{name} = {value}" for name, value in points[group].items()]
            for group in points.sections()
        },
    }


def main() -> None:
    device = target_device()
    os.umask(0o022)  # of the files of a wheel, whoever builds it
    shutil.rmtree(LICENCES, ignore_errors=True)
    LICENCES.mkdir(parents=True)
    setup(
        version=local_version(pinned_base(device)),
        install_requires=requirements(device),
        setup_requires=build_requirements() if device == "cpu" else [],
        distclass=Composed,
        cmdclass={
            "build_py": Compose,
            "editable_wheel": Editable,
            "bdist_wheel": Wheel,
        },
        packages=["vllm"],
        package_dir={"": str(EDITABLE.relative_to(ROOT))},
        include_package_data=False,
        options={
            "egg_info": {"egg_base": "build"},
            "build": {"build_base": "build/setuptools"},
        },
        **of_release(),
    )


try:
    main()
except OverlayError as error:
    raise SystemExit(f"error: {error}") from None
