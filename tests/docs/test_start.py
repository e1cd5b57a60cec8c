# SPDX-License-Identifier: Apache-2.0
"""The examples for machines without a GPU run, and linked files exist."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.real_model.demo import fill_bundled
from tools.real_model.model import NAME

WITHOUT_GPU = (ROOT / "docs/start.md").read_text().partition("## Without a GPU")[2]
MODELS = Path("~/.cache/vllm-base/models").expanduser()  # by `make demo`
# mkdocs checks the links below docs/.
FOLDERS = ("benchmarks", "examples", "models")
PAGES = [*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", WITHOUT_GPU, re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.fixture
def env(engine_env, on_cpu: bool) -> dict[str, str]:
    if not on_cpu:
        pytest.skip("for a machine without a GPU")
    if not (MODELS / NAME / "config.json").is_file():
        pytest.skip("needs `make demo`, once")
    fill_bundled(MODELS / NAME)
    return engine_env | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_python(env):
    (block,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=MODELS,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "The capital of France is Paris." in done.stdout


@pytest.mark.slow
def test_serving(env, tmp_path: Path):
    _, serve, ask = blocks("bash")
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        server = subprocess.Popen(
            ["bash", "-ec", serve],
            **{"cwd": ROOT, "env": env, "stdout": file, "stderr": file},
            start_new_session=True,
        )
    # Wait until the server answers or has exited.
    wait = (
        f"until curl -sf localhost:8000/health; do kill -0 {server.pid}; sleep 1; done"
    )
    command = ["bash", "-eo", "pipefail", "-c", f"{wait}\n{ask}"]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300
        )
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    assert done.returncode == 0, done.stderr + log.read_text()[-4000:]
    assert "The capital of France is Paris." in done.stdout
    assert "country" in done.stdout and "get_weather" in done.stdout
    counted = r"^vllm:\S*num_accepted_tokens_total\S* (\S+)"
    accepted = re.search(counted, done.stdout, re.MULTILINE)
    assert float(accepted[1]) > 0
    assert "Unified speculator" in log.read_text()
