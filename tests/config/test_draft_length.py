# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens_per_batch_size="auto"` in the config."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.drafter.length import (
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


def test_data_parallelism_is_refused(models: Path, target: ModelConfig):
    with pytest.raises(ValueError, match="data_parallel_size=1"):
        config(models, target, "auto", data_parallel_size=2)
    config(models, target, None, data_parallel_size=2)


def settings(**changes) -> SimpleNamespace:
    values = {
        "method": "eagle3",
        "num_speculative_tokens_per_batch_size": "auto",
        "target_parallel_config": None,
    }
    return SimpleNamespace(**values | changes)


def test_other_methods_are_refused():
    check_auto(settings())
    with pytest.raises(ValueError, match="not ngram: give a schedule or unset it"):
        check_auto(settings(method="ngram"))
    check_auto(
        settings(method="ngram", num_speculative_tokens_per_batch_size=[(1, 1, 1)])
    )
