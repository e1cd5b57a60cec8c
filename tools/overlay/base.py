# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream release: which wheel it is, and how it is fetched.

`base.toml` names, for each target device, the wheel's project and its sha256 for each
machine type. A CPU's compiled kernels may come from another release's wheel than its
Python: `[cpu.kernels]`. Wheels are cached in folders named after their hash, so that a
build never fetches one twice and only uses the pinned one.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu", "cuda")


class OverlayError(Exception):
    """An error that the user can fix; the message says how."""


@dataclass(frozen=True)
class Base:
    """One upstream wheel. `sha256` is None only for a release that is not pinned;
    `kernels` is another wheel, whose compiled kernels take the place of this one's."""

    project: str
    version: str
    device: str
    sha256: str | None
    kernels: "Base | None" = None
    outdated: tuple[str, ...] = ()  # ops that the kernels have in an older form
    variable: str = "VLLM_BASE_WHEEL"  # names a file at hand


def load_config(root: Path = ROOT) -> dict:
    return tomllib.loads((root / "base.toml").read_text())


def target_device() -> str:
    """`VLLM_TARGET_DEVICE`, or if unset cuda on machines with an NVIDIA driver."""
    device = os.environ.get("VLLM_TARGET_DEVICE", "").lower()
    if not device:
        has_driver = Path("/proc/driver/nvidia/version").exists()
        return "cuda" if has_driver or shutil.which("nvidia-smi") else "cpu"
    if device not in DEVICES:
        raise OverlayError(
            f"VLLM_TARGET_DEVICE={device} is not supported: set it to "
            f"{' or '.join(DEVICES)}, or unset it to have it detected."
        )
    return device


def pinned_base(device: str, root: Path = ROOT) -> Base:
    """The pinned release of `base.toml` for a device on this machine type."""
    config = load_config(root)
    return _pinned({"version": config["version"], **config[device]}, device)


def _pinned(pins: dict, device: str, variable: str = "VLLM_BASE_WHEEL") -> Base:
    machine, hashes = platform.machine(), pins["sha256"]
    if machine not in hashes:
        raise OverlayError(
            f"{pins['project']} {pins['version']} has no {device} wheel for {machine}: "
            f"base.toml pins {', '.join(hashes)}."
        )
    kernels = pins.get("kernels")
    return Base(
        pins["project"],
        pins["version"],
        device,
        hashes[machine],
        kernels=kernels and _pinned(kernels, device, "VLLM_KERNELS_WHEEL"),
        outdated=tuple(pins.get("outdated", ())),
        variable=variable,
    )


def local_version(base: Base, root: Path = ROOT) -> str:
    """The version of our wheel. vLLM detects the CPU platform by `cpu` in it."""
    suffix = ".cpu" if base.device == "cpu" else ""
    return f"{base.version}+{load_config(root)['label']}{suffix}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_wheel(base: Base) -> Path:
    """A wheel: the file that its variable names, else from the cache, else from pip.

    Raises:
        OverlayError: the wheel is missing, or is not the pinned one.
    """
    if not (given := os.environ.get(base.variable)):
        return cached(base) or fetch(base)
    wheel = Path(given).expanduser()
    if not wheel.is_file():
        raise OverlayError(f"{base.variable}: there is no file {wheel}.")
    if (found := sha256_of(wheel)) != base.sha256:
        raise OverlayError(
            f"{wheel.name} is not the pinned {base.project} {base.version}: its sha256 "
            f"is {found}, base.toml has {base.sha256}. Fetch that one, or unset "
            f"{base.variable}."
        )
    return wheel.resolve()


def pinned_wheel() -> Path:
    """The wheel for `target_device()`."""
    return find_wheel(pinned_base(target_device()))


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm-base"
    return Path(os.environ.get("VLLM_BASE_CACHE") or default).expanduser()


def cached(base: Base) -> Path | None:
    for file in (cache_folder() / base.sha256).glob("*"):
        if sha256_of(file) == base.sha256:
            return file
        file.unlink()  # truncated or damaged: fetch it again
    return None


def fetch(base: Base, kind: str = "--only-binary=:all:", **variables: str) -> Path:
    """Fetches the file into the cache with pip, checking the hash if one is pinned.

    Args:
        kind: pip option that selects the kind of file.
        variables: environment variables for pip.

    Raises:
        OverlayError: pip could not fetch it.
    """
    print(f"Fetching {base.project} {base.version}", file=sys.stderr)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    pin = f" --hash=sha256:{base.sha256}" if base.sha256 else ""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wanted, found = Path(folder, "wanted.txt"), Path(folder, "found")
        wanted.write_text(f"{base.project}=={base.version}{pin}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [kind, "--no-build-isolation", "--dest", str(found)]
        result = subprocess.run(
            [*command, "-r", str(wanted)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise OverlayError(
                f"pip could not fetch {base.project}=={base.version}:\n{result.stderr}"
                f"Check the network and pip's index, or set {base.variable}=<file>."
            )
        (file,) = found.iterdir()
        kept = cache / sha256_of(file) / file.name
        kept.parent.mkdir(exist_ok=True)
        file.replace(kept)
    return kept


def newest_version(project: str) -> str:
    """The newest final release on pip's index; raises OverlayError."""
    command = [sys.executable, "-m", "pip", "index", "versions", project]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (found := re.match(rf"{re.escape(project)} \((\S+)\)", done.stdout)):
        raise OverlayError(
            f"pip could not look up the releases of {project}:\n{done.stderr}"
            "Check the network and pip's index."
        )
    return found[1]


def run_command(args: argparse.Namespace) -> int:
    """Runs the parsed command; returns the exit status. An OverlayError is printed as
    a message without a traceback."""
    try:
        return args.run(args) or 0
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
