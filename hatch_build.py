# SPDX-License-Identifier: Apache-2.0
"""Build hooks: the wheel is the pinned base with this tree's `vllm/` laid over it.

Environment variables that a builder may set:
    VLLM_TARGET_DEVICE: cpu or cuda; unset, cuda where there is an NVIDIA driver.
    VLLM_BASE_WHEEL: a base wheel at hand, used instead of fetching one.
    VLLM_BASE_CACHE: folder for fetched base wheels.
    VLLM_ALLOW_CHANGED_MEMBERS: 1 composes over members that edits.lock does not know.
"""

import shutil
import sys
from collections.abc import Callable
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from overlay import base as overlay_base  # noqa: E402
from overlay.compose import compose  # noqa: E402
from overlay.dependencies import info_text, read_requirements  # noqa: E402
from overlay.native import build, build_requirements  # noqa: E402
from overlay.sbom import write_sbom  # noqa: E402

BUILD = ROOT / "build"
T = TypeVar("T")


def one_clear_error(hook: Callable[..., T]) -> Callable[..., T]:
    """Lets an OverlayError end the build with its message instead of a traceback."""

    @wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        try:
            overlay_base.check_python()
            return hook(*args, **kwargs)
        except overlay_base.OverlayError as error:
            raise SystemExit(f"error: {error}") from None

    return wrapper


class MetadataHook(MetadataHookInterface):
    """Version and dependencies are ours; entry points and extras are the base's."""

    @one_clear_error
    def update(self, metadata: dict) -> None:
        device = overlay_base.target_device()
        base = overlay_base.pinned_base(device)
        metadata["version"] = overlay_base.local_version(base)
        requirements = ROOT / "requirements" / f"{device}.txt"
        metadata["dependencies"] = read_requirements(requirements)
        with ZipFile(overlay_base.find_wheel(base)) as wheel:
            info = f"{base.name}.dist-info"
            self._take_extras(metadata, info_text(wheel, "METADATA").decode())
            self._take_entry_points(metadata, info_text(wheel, "entry_points.txt"))
            metadata["license-files"] = self._licences(wheel, info)

    @staticmethod
    def _take_extras(metadata: dict, text: str) -> None:
        headers: Message = message_from_string(text)
        extras: dict[str, list[str]] = {
            extra: [] for extra in headers.get_all("Provides-Extra", [])
        }
        for line in headers.get_all("Requires-Dist", []):
            requirement = Requirement(line)
            for extra in extras:
                marker = f'extra == "{extra}"'
                if str(requirement.marker) == marker:
                    extras[extra].append(line.partition(";")[0].strip())
        metadata["optional-dependencies"] = extras

    @staticmethod
    def _take_entry_points(metadata: dict, text: bytes) -> None:
        parser = ConfigParser(delimiters="=")
        parser.optionxform = str  # entry point names keep their case
        parser.read_string(text.decode())
        groups = {group: dict(parser[group]) for group in parser.sections()}
        metadata["scripts"] = groups.pop("console_scripts", {})
        metadata["entry-points"] = groups

    @staticmethod
    def _licences(wheel: ZipFile, info: str) -> list[str]:
        """Our licence and notice, and the base's own licence files."""
        folder, prefix = BUILD / "vllm-base", f"{info}/licenses/"
        shutil.rmtree(folder, ignore_errors=True)
        found = ["LICENSE", "NOTICE"]
        for name in wheel.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                target = folder / name.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(name))
                found.append(str(target.relative_to(ROOT)))
        return found


class BuildHook(BuildHookInterface):
    """Composes the tree: copied into the wheel, or linked for an editable install."""

    @one_clear_error
    def dependencies(self) -> list[str]:
        is_cpu = overlay_base.target_device() == "cpu"
        return build_requirements() if is_cpu else []

    @one_clear_error
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        base = overlay_base.pinned_base(overlay_base.target_device())
        wheel = overlay_base.find_wheel(base)
        editable = version == "editable"
        self.tree = BUILD / ("editable" if editable else "wheel")
        ours = self.metadata.version
        compose(wheel, self.tree, version=ours, link=editable)
        if base.device == "cpu":
            build(self.tree)
        build_data["tag"] = "-".join(wheel.stem.split("-")[-3:])
        build_data["pure_python"] = False
        if not editable:
            build_data["force_include"][str(self.tree / "vllm")] = "vllm"
            bill = BUILD / "sboms" / overlay_base.BILL
            requirements = self.metadata.core.dependencies
            write_sbom(bill, base, ours, requirements, self.tree)
            bills = [bill, *sorted((self.tree / "info/sboms").glob("*"))]  # the base's
            build_data["sbom_files"] += map(str, bills)

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        if version != "editable":
            shutil.rmtree(self.tree, ignore_errors=True)
