# SPDX-License-Identifier: Apache-2.0
"""Each benchmark command, on a machine without a GPU, with the bundled models."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.spec_decode import engine, models, pictures
from benchmarks.spec_decode import results as files

ENGINES = f"""--site ours={sys.executable} --site base={sys.executable} --shapes tiny
    --max-num-seqs 4 --kv-cache-gib 0.1 --engines-at-once 9 --time-limit 1e9
    --num-speculative-tokens 3 --concurrency 2 --repeats 1 --context 16
    --output-len 64"""
SMALL = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "ours base-v1 --modes none draft",
            {"ours/none/K0", "ours/draft/K3", "base-v1/draft/K3"},
        ),
        (
            "ours --modes pard --trace t0.5 --draft-tree 7 --auto 3",
            {f"ours/pard/K3{how}" for how in ("", "tree7", "tree7auto")},
        ),
        (
            "ours base-v1 --shapes mimo-7b --trace t0.5 --draft-tree 7",
            {"ours/mtp/K3", "ours/mtp/K3tree7", "base-v1/mtp/K3"},
        ),
    ],
)
def test_engine(
    engine_env, on_cpu: bool, flags: str, settings: set[str], monkeypatch, tmp_path
):
    if not on_cpu:
        pytest.skip("for a machine without a GPU")
    config = models.read_config(models.FOLDER / "mimo-7b/target") | SMALL
    (folder := tmp_path / "mimo-7b/target").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "FOLDER", tmp_path)
    words = f"{ENGINES} --implementations {flags} --output={tmp_path}/found.json"
    monkeypatch.setattr(sys, "argv", ["engine", *words.split()])
    engine.main()
    found = {}
    for text, point in files.load(tmp_path / "found.json")["measurements"].items():
        (repeat,) = point["repeats"]
        assert repeat["tokens_per_s"] > 0
        names = files.KEY.fullmatch(text).group("runner", "mode", "setting")
        found["/".join(names)] = repeat["tokens_per_step"]
    assert settings <= found.keys() and 1 <= min(found.values()) <= max(found.values())
    if "--trace" in flags:  # each engine accepts the same
        (chain,) = {found[key] for key in found if key.endswith("/K3")}
        assert 1 < chain < max(found.values())


def test_pictures(tmp_path: Path):
    pictures.main(["--images", str(tmp_path)])
    assert len(list(tmp_path.glob("*.png"))) == 2
