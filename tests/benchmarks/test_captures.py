# SPDX-License-Identifier: Apache-2.0
"""Time and memory of recording graphs, of runners with and without a speculator."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks.spec_decode import captures


@pytest.mark.parametrize("has_speculator", [True, False])
def test_all_of_it_and_the_drafters_part(monkeypatch, has_speculator: bool):
    class Runner:
        def __init__(self):
            if has_speculator:
                self.speculator = SimpleNamespace(capture=lambda: None)

        def capture_model(self, profile_only=False):
            if has_speculator:
                self.speculator.capture()
            return 7

    module = SimpleNamespace(GPUModelRunner=Runner)
    monkeypatch.setitem(sys.modules, "runner_of_a_test", module)
    monkeypatch.setattr(captures, "RUNNERS", ("runner_of_a_test",))
    reserved = iter([10, 20, 40, 50] if has_speculator else [10, 50])
    monkeypatch.setattr(captures, "reserved_bytes", lambda: next(reserved))
    found = captures.Captures().found
    assert Runner().capture_model() == 7
    taken = {what: entry["reserved_bytes"] for what, entry in found.items()}
    assert taken == ({"drafter": 20, "all": 40} if has_speculator else {"all": 40})
    assert all(entry["s"] >= 0 for entry in found.values())


def test_both_runners_are_known():
    import vllm.v1.worker.gpu.model_runner as v2
    import vllm.v1.worker.gpu_model_runner as v1

    assert (v2.__name__, v1.__name__) == captures.RUNNERS
    for module in (v1, v2):
        assert callable(module.GPUModelRunner.capture_model)
