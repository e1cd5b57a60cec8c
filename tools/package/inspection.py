# SPDX-License-Identifier: Apache-2.0
"""Looks a built wheel over: what an installer, a scanner and a lawyer look for."""

import base64
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import BILL

LIBRARY = "vllm/v1/worker/gpu/spec_decode/unified/_prepare_inputs.so"
LICENCES = ("LICENSE", "NOTICE")


def inspect(path: Path) -> list[str]:
    """What is wrong with a wheel, one line each."""
    version, tag = path.stem.split("-", 2)[1:]
    with ZipFile(path) as wheel:
        info = f"vllm-{version}.dist-info"
        names = wheel.namelist()
        wanted = [f"{info}/licenses/{name}" for name in LICENCES]
        wanted += [f"{info}/sboms/{BILL}"]
        wanted += [LIBRARY] if version.endswith("cpu") else []
        missing = [f"{name} is missing" for name in wanted if name not in names]
        if missing:
            return missing
        found = [*record_problems(wheel, info), *bill_problems(wheel, info, version)]
        if LIBRARY in names:
            found += symbol_problems(wheel.read(LIBRARY), tag)
        times = {entry.date_time for entry in wheel.infolist()}
        return found + ([] if len(times) == 1 else ["its files have several dates"])


def record_problems(wheel: ZipFile, info: str) -> Iterator[str]:
    text = wheel.read(f"{info}/RECORD").decode()
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(text))}
    for name in wheel.namelist():
        if name not in rows:
            yield f"RECORD lacks {name}"
    for name, known in rows.items():
        if known and known != f"sha256={urlsafe(digest(wheel, name).digest())}":
            yield f"RECORD has another hash of {name}"


def urlsafe(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def digest(wheel: ZipFile, name: str):
    with wheel.open(name) as file:
        return hashlib.file_digest(file, "sha256")


def bill_problems(wheel: ZipFile, info: str, version: str) -> Iterator[str]:
    """Whether the bill of materials is of this wheel."""
    bill = json.loads(wheel.read(f"{info}/sboms/{BILL}"))
    named = bill["metadata"]["component"]["version"]
    if named != version:
        yield f"{BILL} is of version {named}"
    for part in bill["components"]:
        if part["type"] != "file":
            continue
        name = part["name"]
        if name not in wheel.namelist():
            yield f"{BILL} names {name}, which is not in the wheel"
        elif digest(wheel, name).hexdigest() != part["hashes"][0]["content"]:
            yield f"{BILL} has another hash of {name}"


def symbol_problems(library: bytes, tag: str) -> Iterator[str]:
    """Whether a library runs on the oldest system that the wheel's tag promises."""
    promised = re.search(r"manylinux_(\d+)_(\d+)", tag)
    if promised is None:
        return
    limit = tuple(map(int, promised.groups()))
    for found in sorted(set(re.findall(rb"GLIBC_(\d+)\.(\d+)", library))):
        if tuple(map(int, found)) > limit:
            needed = b".".join(found).decode()
            yield f"{LIBRARY} needs glibc {needed}, the tag {tag} promises less"
