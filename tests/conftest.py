# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that run whole engines."""

import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

if "cpu" in version("vllm"):
    # A test worker uses one thread, and so does each process that it starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:
    # Otherwise attention computes float32 in TF32, with rounding that depends on the
    # batch.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests with engines first: they take longest, and should not finish last."""
    items.sort(key=lambda item: "engine_env" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of the bundled checkpoints: the target and its drafters.

    `VLLM_TEST_MODELS` names another folder with the same layout.
    """
    folder = Path(os.environ.get("VLLM_TEST_MODELS", ROOT / "models"))
    assert (folder / "target" / "config.json").is_file(), f"no target in {folder}"
    return folder


@pytest.fixture(scope="session")
def held_out_tokens(models: Path) -> list[int]:
    """Token ids of held-out modules of this interpreter's standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    names = json.loads((models / "held_out.json").read_text())
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [(folder / f"{name}.py").read_text() for name in names[:6]]
    return tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="session")
def on_cpu() -> bool:
    return "cpu" in version("vllm")


@pytest.fixture(scope="session")
def engine_env(on_cpu: bool) -> dict[str, str]:
    """Environment of a process that runs an engine: offline, one thread on a CPU."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    on_cpu_only = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A second thread would only spin, and take a core from tests that run at the
        # same time.
        "OMP_NUM_THREADS": "1",
        # Otherwise the workers of all servers are bound to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # "auto" measures step times in every engine.
        "VLLM_DISABLE_COMPILE_CACHE": "1",
    }
    return env | (on_cpu_only if on_cpu else {})


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    """What layers of a model need of vLLM's process groups, in a test's own process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups

    with set_current_vllm_config(VllmConfig()):
        file = f"file://{tmp_path / 'ranks'}"
        groups.init_distributed_environment(1, 0, file, 0, "gloo")
        groups.ensure_model_parallel_initialized(1, 1)
        yield
    groups.destroy_model_parallel()
    groups.destroy_distributed_environment()


@pytest.fixture(scope="session")
def engine_flags(on_cpu: bool) -> list[str]:
    """Flags of `vllm serve` for the bundled models: small, float32 to avoid ties."""
    flags = ["--dtype=float32", "--max-num-seqs=8", "--gpu-memory-utilization=0.3"]
    return flags + (["-cc.mode=none"] if on_cpu else [])


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """`caplog` with vLLM's log, which does not propagate to the root logger."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # Otherwise the next engine config would undo it, after a test with another level.
    configure_logging_if_needed(LoggingConfig())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm")
    return caplog
