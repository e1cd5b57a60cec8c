# SPDX-License-Identifier: Apache-2.0
"""Step times of an earlier start are used only if they are this engine's."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.config.drafter import DrafterConfig, StepTimes
from vllm.config.drafter.length import AutoSchedule
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.auto import kept
from vllm.v1.spec_decode.auto.kept import file_of, load, save

TIMES = StepTimes({256: {1: {0: 1.0, 2: 2.0}}, 999: {1: {2: 9.0}}}, {4: {0.5: 1.75}})


@pytest.fixture
def config(monkeypatch, tmp_path):
    """Some settings of an engine that chooses up to two drafts."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=2,
            num_speculative_tokens_per_batch_size=AutoSchedule([0, 2]),
            drafter=DrafterConfig("draft_model", 2),
            attention_backend=None,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            world_size=1,
            disable_custom_all_reduce=False,
            distributed_executor_backend=None,
            nnodes=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=512),
        compilation_config=SimpleNamespace(
            cudagraph_mode=None, cudagraph_capture_sizes=[1, 2]
        ),
    )


WORKERS = [("models, device", "driver"), ("the same", "driver")]


def test_later_start_finds_what_was_kept(config, caplog_vllm):
    path = file_of(config, True, WORKERS)
    assert load(path) is None and not caplog_vllm.text
    for times in (TIMES, StepTimes(TIMES.passes)):
        save(path, times)
        with caplog_vllm.at_level("INFO", logger="vllm"):
            assert load(path) == times
        assert [*path.parent.iterdir()] == [path]
    assert f"{path}. To measure anew, delete" in caplog_vllm.text


@pytest.mark.parametrize(
    "part, name, value",
    [
        (
            "speculative",
            "num_speculative_tokens_per_batch_size",
            AutoSchedule([0, 1, 2]),
        ),
        ("speculative", "draft_sample_method", "greedy"),
        ("speculative", "attention_backend", AttentionBackendEnum.FLASH_ATTN),
        ("speculative", "drafter", DrafterConfig("eagle3", 2)),
        ("scheduler", "max_num_seqs", 9),
        ("model", "max_model_len", 513),
        ("compilation", "cudagraph_capture_sizes", [1]),
    ],
)
def test_other_settings_have_another_file(part: str, name: str, value, config):
    path = file_of(config, True, WORKERS)
    assert path == file_of(config, True, WORKERS) != file_of(config, False, WORKERS)
    setattr(getattr(config, f"{part}_config"), name, value)
    assert file_of(config, True, WORKERS) != path


def test_other_environments_have_another_file(config, monkeypatch):
    path, other = file_of(config, True, WORKERS), file_of(config, True, WORKERS[:1])
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert len({path, other, file_of(config, True, WORKERS)}) == 3
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    assert file_of(config, True, WORKERS) is None
    save(None, TIMES)
    assert load(None) is None


def test_fingerprint_is_the_worker_s_own(monkeypatch):
    """Regression: the engine's own process may have no device, as with Ray."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    monkeypatch.setattr(kept, "compute_plan_fingerprint", lambda *of: of)
    found, *_ = kept.fingerprint(SimpleNamespace(vllm_config=config))
    assert found == (config, 0, 2)


def test_data_parallel_ranks_keep_none(config):
    """Some might find a file, and the others wait for them."""
    config.parallel_config.data_parallel_size = 2
    assert file_of(config, True, WORKERS) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"passes": {"256": {"1": {"0": 1.0, "2": null}}}}',
        '{"passes": {"256": {"1": {"0": 1.0, "2": 2.0}}}, "trimmed": [1]}',
    ],
)
def test_corrupt_file_is_replaced(text: str, tmp_path, caplog_vllm):
    path = tmp_path / "times.json"
    path.write_text(text)
    assert load(path) is None
    assert caplog_vllm.text.count("timed anew") == 1
    save(path, TIMES)
    assert load(path) == TIMES


def test_forbidden_folder_is_no_error(tmp_path, monkeypatch, caplog_vllm):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("exists", "read_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert load(tmp_path / "times.json") is None
    assert "Permission denied" in caplog_vllm.text


def test_full_disk_is_no_error(tmp_path, caplog_vllm):
    (tmp_path / "folder").write_text("")
    save(tmp_path / "folder" / "times.json", TIMES)
    assert "time steps again" in caplog_vllm.text
