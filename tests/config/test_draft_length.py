# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens_per_batch_size="auto"` in the config."""

import pickle
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.engine import settle_auto
from vllm.config.drafter.length import (
    AutoSchedule,
    candidate_lengths,
    check_auto,
    covering_lookup,
    is_auto,
    parse_schedule,
)
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup


@pytest.mark.parametrize("longest", [1, 3, 6, 7, 15, 40])
def test_candidates_range_from_none_to_the_longest(longest: int):
    lengths = candidate_lengths(longest)
    assert lengths == sorted(set(lengths))
    assert (lengths[0], lengths[-1]) == (0, longest)


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 8, 256])
def test_lookup_for_graphs_names_every_candidate(max_batch_size: int):
    lookup = build_dynamic_sd_schedule_lookup("auto", max_batch_size, 7)
    assert lookup == covering_lookup(max_batch_size, 7)
    assert set(lookup[1:]) == set(candidate_lengths(7))
    assert len(lookup) > max_batch_size
    if max_batch_size == 256:  # graphs of a length reach to the last batch that has it
        assert lookup[-7:] == candidate_lengths(7)


def test_a_schedule_is_still_the_bases():
    schedule = [(1, 2, 3), (3, 4, 0)]
    assert build_dynamic_sd_schedule_lookup(schedule, 5, 3) == [0, 3, 3, 0, 0, 0]
    with pytest.raises(ValueError):
        build_dynamic_sd_schedule_lookup("automatic", 5, 3)


@pytest.mark.parametrize("value", ["auto", None, [(1, 4, 3)], [[1, 4, 3]]])
def test_what_may_stand_there(value):
    assert parse_schedule(value) is value


@pytest.fixture
def target(models: Path) -> ModelConfig:
    return ModelConfig(model=str(models / "target"), dtype="float32")


def config(models: Path, target: ModelConfig, schedule, **parallel):
    return SpeculativeConfig(
        model=str(models / "pard"),
        num_speculative_tokens=7,
        num_speculative_tokens_per_batch_size=schedule,
        target_model_config=target,
        target_parallel_config=ParallelConfig(**parallel),
    )


def test_auto_survives_pickling(models: Path, target: ModelConfig):
    spec = config(models, target, "auto")
    assert is_auto(spec)
    assert spec.uses_dynamic_speculative_decoding()
    assert is_auto(pickle.loads(pickle.dumps(spec)))
    assert not is_auto(config(models, target, [[1, 4, 3]]))
    assert not is_auto(None)


def test_any_other_string_is_refused(models: Path, target: ModelConfig):
    with pytest.raises(ValueError, match='must be "auto" or a list') as error:
        config(models, target, "automatic")
    assert str(error.value).count("num_speculative_tokens_per_batch_size") == 2


def parallel(**changes) -> SimpleNamespace:
    values = {
        "data_parallel_size": 1,
        "enable_elastic_ep": False,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
    }
    return SimpleNamespace(**values | changes)


def settings(**changes) -> SimpleNamespace:
    values = {
        "method": "eagle3",
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": "auto",
        "is_auto_by_default": False,
        "target_parallel_config": None,
        "draft_tree": None,
        "drafter": SimpleNamespace(unsupported=None),
    }
    return SimpleNamespace(**values | changes)


UNSUPPORTED = {
    "enable_elastic_ep": settings(
        target_parallel_config=parallel(data_parallel_size=2, enable_elastic_ep=True)
    ),
    "choose by its own clock": settings(
        target_parallel_config=parallel(
            distributed_executor_backend="external_launcher"
        )
    ),
    "method ngram: give a schedule or unset it": settings(method="ngram"),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_auto_does_not_support_is_refused(message):
    with pytest.raises(ValueError, match=message):
        check_auto(UNSUPPORTED[message])


def test_only_auto_is_checked():
    schedule = {"num_speculative_tokens_per_batch_size": [(1, 1, 1)]}
    check_auto(settings(method="ngram", **schedule))
    check_auto(settings())


@pytest.mark.parametrize("spec", UNSUPPORTED.values())
def test_a_default_is_fixed_instead_and_one_line_says_so(spec, caplog_vllm):
    spec = copy(spec)
    spec.is_auto_by_default = True
    with caplog_vllm.at_level("INFO", logger="vllm"):
        check_auto(spec)
    assert not is_auto(spec)
    (line,) = caplog_vllm.messages
    assert "Every draft has 7 tokens" in line and "num_speculative_tokens" in line


def test_data_parallel_engines_choose():
    spec = settings(target_parallel_config=parallel(data_parallel_size=2))
    check_auto(spec)
    assert is_auto(spec)


@pytest.mark.parametrize("is_default", [False, True])
def test_several_steps_at_once_choose_only_if_asked_to(is_default):
    stages = parallel(pipeline_parallel_size=2)
    spec = settings(target_parallel_config=stages, is_auto_by_default=is_default)
    check_auto(spec)
    assert is_auto(spec) != is_default


@pytest.mark.parametrize(
    "unsupported, is_v2, watermark",
    [
        (None, True, None),
        (None, False, None),
        ("a draft model with M-RoPE", True, None),
        (None, True, "some"),
    ],
)
def test_a_default_needs_the_unified_speculator(unsupported, is_v2, watermark):
    drafter = DrafterConfig("draft_model", 7, unsupported=unsupported)
    config = SimpleNamespace(
        speculative_config=settings(drafter=drafter, is_auto_by_default=True),
        use_v2_model_runner=is_v2,
        watermark_config=watermark,
    )
    runs = unsupported is None and is_v2 and watermark is None
    assert settle_auto(config) == is_auto(config.speculative_config) == runs
    config.speculative_config = settings(drafter=drafter)
    assert settle_auto(config)  # where it was asked for another check refuses it
    config.speculative_config = None
    assert not settle_auto(config)


def test_trees_are_candidates_beyond_the_longest_chain():
    assert candidate_lengths(7, 63) == [0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63]
    assert candidate_lengths(7, 20) == [0, 1, 2, 3, 4, 5, 7, 11, 15, 20]
    assert candidate_lengths(7, 7) == candidate_lengths(7)


def test_auto_keeps_what_it_chooses_between():
    schedule = AutoSchedule([0, 3, 7, 15])
    for same in (schedule, copy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert same == "auto"
        assert same.lengths == (0, 3, 7, 15)
    assert set(covering_lookup(64, 15, schedule)[1:]) == {0, 3, 7, 15}
    lookup = build_dynamic_sd_schedule_lookup(schedule, 64, 15)
    assert set(lookup[1:]) == {0, 3, 7, 15}
