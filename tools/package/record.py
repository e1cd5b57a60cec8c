# SPDX-License-Identifier: Apache-2.0
"""What `reproduce` built: kept in record.json, shown by docs/releasing.md."""

import json
import platform
import subprocess
from pathlib import Path
from zlib import ZLIB_RUNTIME_VERSION

from tools.overlay.base import ROOT, pinned_base, sha256_of
from tools.overlay.native import compiler
from tools.overlay.provenance import provenance, source_of

RECORD = Path(__file__).with_name("record.json")


def record(wheel: Path, device: str, path: Path = RECORD, root: Path = ROOT) -> None:
    """Puts a wheel that two builds agreed on in the record, by device and machine."""
    machine = platform.machine()
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[f"{device}-{machine}"] = {
        "wheel": wheel.name,
        "bytes": wheel.stat().st_size,
        "sha256": sha256_of(wheel),
        "builds": 2,
        **provenance(path, root),
        "base_sha256": pinned_base(device, root).sha256,
        "python": platform.python_version(),
        "zlib": ZLIB_RUNTIME_VERSION,
        "compiler": _compiler() if device == "cpu" else None,
    }
    path.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def _compiler() -> str | None:
    """The C++ compiler as it names itself; None where there is none."""
    if (path := compiler()) is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0]


def wheel_table(path: Path = RECORD) -> str:
    """The recorded wheels, for the docs."""
    rows = ["| wheel | MB | sha256 | built twice from | on | with |"]
    rows.append("| --- | ---: | --- | --- | --- | --- |")
    for found in json.loads(path.read_text()).values():
        tools = [f"Python {found['python']}", f"zlib {found['zlib']}"]
        tools += [found["compiler"]] if found["compiler"] else []
        cells = [f"`{found['wheel']}`", f"{found['bytes'] / 1e6:.1f}"]
        cells += [
            f"`{found['sha256']}`",
            source_of(found),
            found["date"],
            ", ".join(tools),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
