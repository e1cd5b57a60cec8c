# SPDX-License-Identifier: Apache-2.0
"""Each benchmark command, on a machine without a GPU, with the bundled models."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spec_decode import models, pictures
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import MAIN
from benchmarks.spec_decode.results import PointKey

ENGINES = f"""--site ours={sys.executable} --site base={sys.executable} --shapes tiny
    --max-num-seqs 4 --kv-cache-gib 0.1 --engines-at-once 9 --time-limit 1e9
    --num-speculative-tokens 3"""


SMALL = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.fixture(autouse=True)
def small_mimo(monkeypatch, tmp_path: Path) -> None:
    config = models.read_config(models.FOLDER / "mimo-7b/target") | SMALL
    (folder := tmp_path / "models/mimo-7b/target").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "FOLDER", tmp_path / "models")


@pytest.fixture
def run(monkeypatch, on_cpu: bool, tmp_path: Path):
    if not on_cpu:
        pytest.skip("for a machine without a GPU")

    def measurements(command: str, flags: str) -> dict[str, dict[str, Any]]:
        output = tmp_path / "found.json"
        words = [command, *flags.split(), f"--output={output}"]
        monkeypatch.setattr(sys, "argv", words)
        importlib.import_module(f"benchmarks.spec_decode.{command}").main()
        return files.load(output)["measurements"]

    return measurements


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "ours base-v1 --modes none draft",
            {"ours/none/K0", "ours/draft/K3", "base-v1/draft/K3"},
        ),
        (
            "ours --modes pard --trace t0.5 --draft-tree 7 --share-engines --auto 3",
            {f"ours/pard/K3{how}" for how in ("", "tree7", "tree7auto")},
        ),
        (
            "ours base-v1 --shapes mimo-7b --trace t0.5 --draft-tree 7",
            {"ours/mtp/K3", "ours/mtp/K3tree7", "base-v1/mtp/K3"},
        ),
    ],
)
def test_engine(engine_env, run, flags: str, settings: set[str]):
    more = "--concurrency 2 --repeats 1 --context 16 --output-len 64"
    found = run("engine", f"{ENGINES} {more} --implementations {flags}")
    keys = {str(PointKey.parse(text).engine._replace(shapes=MAIN)) for text in found}
    assert settings <= keys
    for repeat in (repeat for point in found.values() for repeat in point["repeats"]):
        assert repeat["tokens_per_s"] > 0 and 1 <= repeat["tokens_per_step"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, settings",
    [
        ("", ["K3"]),
        ("--trace t0.5 --draft-tree 7", ["K3/recorded-t0.5", "K3tree7/recorded-t0.5"]),
    ],
)
def test_serving(engine_env, run, more: str, settings: list[str]):
    flags = "--implementations ours --modes pard --request-rate 2 inf --max-prompts 4"
    load = "--burstiness 0.5 --num-warmups 1 --random-output-len 16"
    found = run("serving", f"{ENGINES} {flags} {more} {load}")
    assert len(found) == 2 * len(settings)
    assert {f"ours/pard@tiny/{s}/rate2.0 {load}" for s in settings} <= found.keys()
    for point in found.values():
        assert point["completed"] == 4 and point["median_tpot_ms"] > 0


def test_pictures(tmp_path: Path):
    pictures.main(["--images", str(tmp_path)])
    assert len(list(tmp_path.glob("*.png"))) == 3
