# SPDX-License-Identifier: Apache-2.0
"""What we rely on of a base is read off our files, and checked against another base."""

from zipfile import ZipFile

import pytest

from tests.overlay.fakes import addition, seam, write_overlay, write_wheel
from tools.overlay import relied
from tools.overlay.base import ROOT, find_wheel, pinned_base, target_device
from tools.overlay.relied import losses, properties
from tools.overlay.sources import Sources

PART = "vllm/part.py"
BASE = """\
from dataclasses import dataclass


@dataclass
class Batch:
    size: int
    rows: int = 0


class Runner:
    def __init__(self, device):
        self.device = device

    def run(self, batch, steps=1):
        return self.note(batch)

    def note(self, batch, loud=False):
        return batch

    @staticmethod
    def parse(text):
        return text


def make(first, second, *, third=None):
    return Batch(first, rows=second)
"""
SEAM = """
class Runner(upstream.Runner):
    @staticmethod
    def parse(text):
        return upstream.Runner.parse(text)
"""
OURS = """
from vllm.part import Batch, Runner, make


class Ours(Runner):
    def run(self, batch, steps=1):
        self.note(batch, loud=True)
        return super().run(batch, steps), self.device


def use(batch: Batch | None):
    return make(batch.size, 2, third=3), Batch(1, rows=2)
"""


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """For a change of the base, what no longer holds, by what we do."""
    monkeypatch.setattr(relied, "TEXTS", [(PART, "make", "rows = second")])
    overlay = {PART: seam(PART, SEAM), "vllm/ours.py": addition(OURS)}

    def compare(old: str, new: str) -> dict[str, str]:
        assert old in BASE
        wheels = [
            write_wheel(tmp_path / name, {PART: text})
            for name, text in (("old", BASE), ("new", BASE.replace(old, new)))
        ]
        root = write_overlay(tmp_path / "repo", overlay, wheels[0])
        with ZipFile(wheels[0]) as before, ZipFile(wheels[1]) as after:
            known = properties(Sources(before, root))
            assert not [p for p in known.values() if p.problem]
            found = losses(known, properties(Sources(after, root)))
        return {key[3]: problem for key, problem in found.items() if problem}

    return compare


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("steps=1", "steps=1", {}),
        ("note(self, batch, loud=False)", "note(self, batch, loud=False, x=0)", {}),
        (
            "note(self, batch, loud=False)",
            "note(self, batch)",
            {"call of `self.note`": "has no parameter loud"},
        ),
        (
            "run(self, batch, steps=1)",
            "run(self, batch, steps=1, more=None)",
            {"override `Ours.run`": "ours does not take more"},
        ),
        (
            "def parse(text)",
            "def parse(text, hint=None)",
            {"override `Runner.parse`": "ours does not take hint"},
        ),
        (
            "make(first, second, *,",
            "make(second, first, *,",
            {
                "call of `make`": "we pass first, second, third=, which it takes as "
                "second, first, third="
            },
        ),
        (
            "make(first, second, *, third=None)",
            "make(first, second, fourth, *, third=None)",
            {"call of `make`": "now needs fourth"},
        ),
        (
            "make(first, second, *, third=None)",
            "make(first, *, second=0, third=None)",
            {"call of `make`": "takes 1 arguments by place, not 2"},
        ),
        ("self.device = device", "pass", {"read of `self.device`": "is not there"}),
        (
            "    size: int\n",
            "    length: int\n",
            {
                "read of `batch.size`": "is not there",
                "call of `Batch`": "we pass size, rows=, which it takes as length, "
                "rows=",
            },
        ),
        (
            "rows=second",
            "rows=2",
            {"text of `make`": "no longer contains rows = second"},
        ),
        (
            "def make(",
            "def build(",
            {"call of `make`": "is gone", "text of `make`": "no longer contains "
             "rows = second"},
        ),
    ],
)  # fmt: skip
def test_losses(lost, old: str, new: str, expected: dict):
    assert lost(old, new) == expected


def test_of_the_pinned_base_everything_holds_that_can_be_told():
    with ZipFile(find_wheel(pinned_base(target_device()))) as wheel:
        found = properties(Sources(wheel, ROOT))
    assert len(found) > 200
    unclear = {key[3] for key, known in found.items() if known.problem}
    # An enum's own attributes, and what another of our classes sets.
    assert unclear <= {
        "read of `support.name`",
        "read of `support.value`",
        "read of `self._draft_vllm_config`",
    }
    texts = [known for key, known in found.items() if key[3].startswith("text")]
    assert len(texts) == len(relied.TEXTS)
