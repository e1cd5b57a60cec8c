# SPDX-License-Identifier: Apache-2.0
"""The bill of materials: valid CycloneDX, and what is in the wheel."""

import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

from tools.overlay.base import DEVICES, ROOT, load_config, local_version, pinned_base
from tools.overlay.dependencies import read_requirements
from tools.overlay.sbom import describe, pinned_version, required, write_sbom
from tools.overlay.seams import overlay_files

LIBRARY = "vllm/v1/worker/gpu/spec_decode/unified/_prepare_inputs.so"


@pytest.fixture(scope="module")
def validator() -> JsonStrictValidator:
    return JsonStrictValidator(SchemaVersion.V1_6)


def bill_of(device: str, folder) -> str:
    """The bill of this repository's wheel; it stands for its own composed tree."""
    tree = folder / "tree"
    for path in overlay_files(ROOT):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((ROOT / path).read_bytes())
    if device == "cpu":
        (tree / LIBRARY).write_bytes(b"library")
    base = pinned_base(device, machine="x86_64")
    requirements = read_requirements(ROOT / "requirements" / f"{device}.txt")
    path = folder / "bills" / "bill.json"
    write_sbom(path, base, local_version(base), requirements, tree)
    return path.read_text()


@pytest.fixture(scope="module", params=DEVICES)
def wheel(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bill")
    return request.param, json.loads(bill_of(request.param, folder))


def test_valid(wheel, validator):
    assert validator.validate_str(json.dumps(wheel[1])) is None


def test_the_validator_refuses(wheel, validator):
    broken = {**wheel[1], "components": [{"type": "program", "name": "a"}]}
    assert validator.validate_str(json.dumps(broken)) is not None


def test_our_files(wheel):
    device, bill = wheel
    files = {part["name"] for part in bill["components"] if part["type"] == "file"}
    assert files == {*overlay_files(ROOT), *([LIBRARY] if device == "cpu" else [])}


def test_base(wheel):
    device, bill = wheel
    config = load_config()
    project = config[device]["project"]
    (base,) = [part for part in bill["components"] if part["name"] == project]
    assert base["purl"] == f"pkg:pypi/{project}@{config['version']}"
    sha256 = config[device]["sha256"]["x86_64"]
    assert base["hashes"] == [{"alg": "SHA-256", "content": sha256}]
    (ancestor,) = bill["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["purl"] == base["purl"]


def test_requirements(wheel):
    device, bill = wheel
    lines = read_requirements(ROOT / "requirements" / f"{device}.txt")
    said = [
        entry["value"]
        for part in bill["components"]
        for entry in part.get("properties", [])
    ]
    assert sorted(said) == sorted(lines)
    (torch,) = [part for part in bill["components"] if part["name"] == "torch"]
    (line,) = [line for line in lines if Requirement(line).name == "torch"]
    assert line == f"torch=={torch['version']}"


def test_names_are_package_urls(wheel):
    device, bill = wheel
    whole = bill["metadata"]["component"]
    for part in [whole, *bill["components"]]:
        if part["type"] == "library":
            url = PackageURL.from_string(part["purl"])
            named = (url.type, url.name, url.version)
            assert named == ("pypi", part["name"], part.get("version"))
    assert whole["version"].endswith("cpu") == (device == "cpu")


def test_references(wheel):
    bill = wheel[1]
    parts = [part["bom-ref"] for part in bill["components"]]
    assert len(parts) == len(set(parts))
    (edges,) = bill["dependencies"]
    assert edges == {"ref": "wheel", "dependsOn": sorted(parts)}


def test_it_says_nothing_of_time_and_place(tmp_path):
    first, second = (bill_of("cpu", tmp_path / name) for name in ("a", "b/c"))
    assert first == second
    assert str(tmp_path) not in first and str(ROOT) not in first


def test_its_number_is_that_of_its_content():
    base = pinned_base("cpu", machine="x86_64")
    one, same, other = (
        describe(base, version, ["numpy"], [])["serialNumber"] for version in "112"
    )
    assert one == same != other
    assert one.startswith("urn:uuid:")


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        (["a==1.2"], "1.2"),
        (["a[b]==1.2; python_version > '3.11'"], "1.2"),
        (["a==1.*"], None),
        (["a>=1.2"], None),
        (["a==1.2,!=1.3"], None),
        (["a"], None),
        (["a==1; python_version < '3.12'", "a==2; python_version > '3.11'"], None),
    ],
)
def test_pinned_version(lines, version):
    assert pinned_version(lines) == version


def test_a_package_asked_for_twice_is_one_part():
    (part,) = required(["My_Name>=2; python_version > '3.11'", "my-name>=1"])
    assert part["purl"] == "pkg:pypi/my-name"
    assert len(part["properties"]) == 2
