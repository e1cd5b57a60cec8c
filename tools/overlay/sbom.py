# SPDX-License-Identifier: Apache-2.0
"""The wheel's bill of materials: CycloneDX JSON, at `.dist-info/sboms/` (PEP 770).

It is a function of what goes into the wheel, without time or place: a rebuild of the
same inputs repeats it byte for byte.
"""

import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .base import ROOT, Base, sha256_of
from .tree import additions as overlay_files

LICENCE = [{"license": {"id": "Apache-2.0"}}]
Component = dict[str, Any]


def write_sbom(
    path: Path,
    base: Base,
    version: str,
    requirements: list[str],
    tree: Path,
    root: Path = ROOT,
) -> None:
    """Writes the bill of the wheel that is built from `tree`.

    Args:
        path: file to write.
        base: what the tree was composed from.
        version: of our wheel.
        requirements: what the wheel asks for, without extras.
        tree: the composed tree, with the native library if that was built.
        root: the repository.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    bill = describe(base, version, requirements, our_files(tree, root))
    path.write_text(json.dumps(bill, indent=1) + "\n")


def our_files(tree: Path, root: Path) -> list[Component]:
    """Each file of the wheel that is not the base's, by its path there and its hash."""
    libraries = (tree / "vllm").rglob("_prepare_inputs.so")
    paths = {*overlay_files(root), *(str(p.relative_to(tree)) for p in libraries)}
    return [
        {
            "type": "file",
            "bom-ref": f"file:{path}",
            "name": path,
            "hashes": hashes(sha256_of(tree / path)),
            "licenses": LICENCE,
        }
        for path in sorted(paths)
    ]


def describe(
    base: Base, version: str, requirements: list[str], files: list[Component]
) -> dict[str, Any]:
    upstream = package(base.project, base.version)
    upstream["licenses"] = LICENCE
    if base.sha256:
        upstream["hashes"] = hashes(base.sha256)
    wheel = package("vllm", version) | {"bom-ref": "wheel", "licenses": LICENCE}
    wheel["pedigree"] = {
        "ancestors": [{**upstream, "bom-ref": "ancestor"}],
        "notes": "Files of this repository, listed here, are laid over the ancestor.",
    }
    needed = required(requirements)
    parts = [upstream, *needed, *files]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": "",
        "version": 1,
        "metadata": {"component": wheel},
        "components": parts,
        "dependencies": [
            {"ref": "wheel", "dependsOn": sorted(p["bom-ref"] for p in parts)}
        ],
        # What the requirements require in turn is for the installer to choose.
        "compositions": [{"aggregate": "incomplete", "dependencies": ["wheel"]}],
    }
    name = json.dumps(bill, sort_keys=True)
    bill["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, name).urn
    return bill


def hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def package(name: str, version: str | None = None) -> Component:
    """A package of the package index; its version only where one alone will do."""
    name = canonicalize_name(name)
    at = f"@{quote(version, safe='')}" if version else ""
    purl = f"pkg:pypi/{name}{at}"
    found: Component = {"type": "library", "bom-ref": purl, "name": name, "purl": purl}
    return found | ({"version": version} if version else {})


def required(lines: list[str]) -> list[Component]:
    """The packages that a wheel asks for, each with the lines that ask for it."""
    by_name: dict[str, list[str]] = {}
    for line in sorted(lines):
        by_name.setdefault(canonicalize_name(Requirement(line).name), []).append(line)
    found = []
    for name, asking in sorted(by_name.items()):
        component = package(name, pinned_version(asking))
        component["properties"] = [
            {"name": "vllm:requirement", "value": line} for line in asking
        ]
        found.append(component)
    return found


def pinned_version(lines: list[str]) -> str | None:
    if len(lines) > 1:
        return None
    pins = list(Requirement(lines[0]).specifier)
    exact = len(pins) == 1 and pins[0].operator == "==" and "*" not in pins[0].version
    return pins[0].version if exact else None
