# SPDX-License-Identifier: Apache-2.0
"""Loading of native kernels, and that Python and C++ use the same structs."""

from dataclasses import replace

import pytest

from tools.overlay.base import ROOT
from tools.overlay.native import compiler
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode import native
from vllm.v1.worker.gpu.spec_decode.unified.tree import native as draft_tree

HEADERS = {"tree_structs.h": draft_tree.LIBRARY}
each_library = pytest.mark.parametrize("library", HEADERS.values(), ids=HEADERS)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """The warnings that are logged."""
    lines: list[str] = []
    monkeypatch.setattr(
        native.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    return lines


def expect_one_line(
    warnings: list[str], library: native.NativeLibrary, why: str
) -> None:
    assert library.loaded is None
    assert library.loaded is None
    (line,) = warnings
    assert line.startswith(library.instead)
    assert f"than as C++. {library.file.name} cannot be loaded: {why}" in line
    assert line.endswith(
        "Install a C++ compiler (g++ or clang++), then reinstall vLLM."
    )


@each_library
@pytest.mark.skipif(not current_platform.is_cpu(), reason="it is for CPUs")
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_library_is_built(library):
    """Otherwise the tests of its kernels would be skipped."""
    assert library.loaded is not None, "run `make env`"


def test_not_built(warnings, tmp_path):
    library = replace(draft_tree.LIBRARY, file=tmp_path / "_kernel.so")
    expect_one_line(warnings, library, "it was not built.")


def test_not_a_library(warnings, tmp_path):
    file = tmp_path / "_kernel.so"
    file.write_text("for another machine")
    expect_one_line(warnings, replace(draft_tree.LIBRARY, file=file), f"{file}: ")


@each_library
def test_built_from_other_sources(warnings, library):
    """For example with a field that was moved, or whose type has changed."""
    if not library.file.exists():
        pytest.skip("the library was not built")
    other = replace(library, structs=library.structs[::-1])
    expect_one_line(warnings, other, "it was built from other sources.")


@pytest.mark.parametrize(("name", "library"), HEADERS.items())
def test_header_matches_declarations(name, library):
    found = (ROOT / "csrc" / name).read_text()
    assert found == library.header(), "run `python csrc/write_structs.py`"
