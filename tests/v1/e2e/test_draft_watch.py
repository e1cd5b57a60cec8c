# SPDX-License-Identifier: Apache-2.0
"""What is noticed of draft passes: which graphs ran, and where the host waited."""

from types import SimpleNamespace

import pytest
import torch

from . import draft_watch
from .draft_watch import DraftWatch


class Speculator:
    """One pass a step: a piecewise graph, then FULL ones, then none."""

    device = SimpleNamespace(type="cpu")

    def __init__(self):
        self.graphs, self.calls = self, 0

    def propose(self, num_speculative_tokens=None):
        self.calls += 1
        if self.calls == 1:
            self.run_pw_graph()
        elif self.calls < 4:
            self.run_fullgraph()
        return "drafts"

    def run_pw_graph(self):
        pass

    def run_fullgraph(self):
        pass


def test_what_stood_for_draft_passes():
    speculator = Speculator()
    watch = DraftWatch(speculator)
    for length in (7, 7, 3, 0):
        assert speculator.propose(num_speculative_tokens=length) == "drafts"
    found = watch.describe()
    assert found["steps"] == {"piecewise": 1, "full": 2, "eager": 1}
    assert found["drafted"] == {7: 2, 3: 1, 0: 1}
    assert found["waited_at"] == []


def test_a_wait_is_noted_and_made_up_for(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError(draft_watch.WAIT)
        return 5

    found, place = draft_watch.call_without_waits(waits, is_cuda=True)
    assert found == 5 and place.startswith("test_draft_watch.py:")
    assert modes == ["error", "default"]

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        draft_watch.call_without_waits(fails, is_cuda=True)
    assert modes[-1] == "default"


def test_waits_that_go_unnoticed_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    number = SimpleNamespace(item=lambda: 1.0)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: number)
    with pytest.raises(RuntimeError, match="does not notice"):
        draft_watch.check_that_waits_are_noticed()
