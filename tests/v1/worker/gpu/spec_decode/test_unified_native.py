# SPDX-License-Identifier: Apache-2.0
"""How the native input kernel is found, and that both sides mean the same structs."""

import re

import pytest

from tools.overlay.base import ROOT
from tools.overlay.native import compiler
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.unified import inputs, native

SOURCE = ROOT / "csrc" / "prepare_inputs.cpp"
STRUCTS = {
    "VerifiedBatch": inputs.VerifiedBatch,
    "Drafts": inputs._Drafts,
    "KVTables": inputs._KVTables,
    "Out": inputs._Out,
    "Hidden": inputs._Hidden,
    "Pass": native._Pass,
}


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is logged while the library is looked for afresh."""
    lines: list[str] = []
    monkeypatch.setattr(
        native.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    native.load.cache_clear()
    yield lines
    native.load.cache_clear()


def expect_one_line(warnings: list[str], why: str) -> None:
    assert inputs.native_library() is None
    assert inputs.native_library() is None
    (line,) = warnings
    assert f"interpreted on the CPU, which is slow, for want of {why}" in line
    assert line.endswith("Install a C++ compiler (g++ or clang++), then vLLM again.")


@pytest.mark.skipif(not current_platform.is_cpu(), reason="it is for CPUs")
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_it_is_built():
    """Else tests of what it computes are skipped."""
    assert inputs.native_library() is not None, "run `make env`"


def test_not_built(warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_prepare_inputs.so")
    expect_one_line(warnings, "_prepare_inputs.so: it was not built.")


def test_not_a_library(warnings, tmp_path, monkeypatch):
    library = tmp_path / "_prepare_inputs.so"
    library.write_text("for another machine")
    monkeypatch.setattr(native, "LIBRARY", library)
    expect_one_line(warnings, f"_prepare_inputs.so: {library}: ")


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the library was not built")
def test_built_from_other_sources(warnings, monkeypatch):
    monkeypatch.setattr(native._Pass, "_fields", native._Pass._fields[1:])
    expect_one_line(warnings, "_prepare_inputs.so: it was built from other sources.")


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_are_those_of_the_source(name):
    (body,) = re.findall(
        rf"^struct {name} {{\n(.*?)^}};", SOURCE.read_text(), re.M | re.S
    )
    fields = re.findall(r"(\w+);", body)
    assert fields == list(STRUCTS[name]._fields)


def test_structs_are_sized_in_the_order_they_are_loaded_in(monkeypatch):
    passed = []
    monkeypatch.setattr(native, "load", lambda *structs: passed.extend(structs))
    inputs.native_library()
    (sizes,) = re.findall(r"struct_sizes\[\d\] = {(.*?)};", SOURCE.read_text(), re.S)
    names = re.findall(r"sizeof\((\w+)\)", sizes)
    assert [STRUCTS[name] for name in names] == [*passed, native._Pass]
