# SPDX-License-Identifier: Apache-2.0
"""MTP modules: which of them the unified speculator runs, and how much is drafted."""

import json
from types import SimpleNamespace

import pytest

from vllm.config.drafter import resolve
from vllm.config.drafter.length import is_auto
from vllm.config.drafter.resolve import find_unsupported

from .specs import checkpoint, engine_config, unresolved  # noqa: F401

METHOD = {"method": "mtp"}
SEVERAL = "several MTP modules"


@pytest.fixture
def target(models, checkpoint, monkeypatch):  # noqa: F811
    """Makes a target with so many MTP modules."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = json.loads((models / "target" / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    return lambda modules: checkpoint(
        config | {"num_nextn_predict_layers": modules}, name="target"
    )


@pytest.mark.parametrize(
    "modules, settings, num_drafts, chooses, why",
    [
        (1, {}, 7, True, None),
        (1, {"num_speculative_tokens": 3}, 3, False, None),
        (1, {"num_speculative_tokens": 3, "draft_tree": 12}, 3, False, None),
        (1, {"draft_window": 64, "max_model_len": 128}, 7, True, None),
        (1, {"use_local_argmax_reduction": True}, 7, True, None),
        # vLLM's own speculator drafts a token with each.
        (3, {}, 3, False, SEVERAL),
        (3, {"num_speculative_tokens": 6}, 6, False, SEVERAL),
        (3, {"num_speculative_tokens": 1}, 1, False, None),
    ],
)
def test_drafter_of_a_target(
    modules: int, settings: dict, num_drafts: int, chooses, why, target, monkeypatch
):
    said: list[str] = []
    line = SimpleNamespace(warning_once=lambda text, *args: said.append(text % args))
    line.info = print
    monkeypatch.setattr(resolve, "logger", line)
    folder = target(modules)
    made = engine_config(folder, METHOD | settings, load_format="dummy")
    spec, drafter = made.speculative_config, made.speculative_config.drafter
    assert spec.model == str(folder) and drafter.mode == "mtp"
    assert drafter.num_speculative_tokens == num_drafts
    assert drafter.num_nodes == settings.get("draft_tree")
    assert drafter.limit(1000) == settings.get("max_model_len", 1000)
    assert (is_auto(spec), drafter.is_unified) == (chooses, why is None)
    assert drafter.unsupported == why
    lines = [line for line in said if "falls back" in line]
    assert [why in line for line in lines] == ([] if why is None else [True])


@pytest.mark.parametrize(
    "settings, refusal",
    [
        ({"draft_tree": 12}, f"draft_tree does not support {SEVERAL}"),
        ({"draft_window": 64}, f"draft_window does not support {SEVERAL}"),
        ({"parallel_drafting": True}, 'method "mtp"'),
    ],
)
def test_refused_settings(settings: dict, refusal: str, target):
    folder = target(1 if "parallel_drafting" in settings else 3)
    spec = METHOD | {"num_speculative_tokens": 3} | settings
    with pytest.raises(ValueError, match=refusal):
        engine_config(folder, spec, load_format="dummy")


@pytest.mark.parametrize(
    "name, config, settings, why",
    [
        ("DeepSeekMTPModel", {}, {}, None),
        ("DeepSeekMTPModel", {"index_topk": 64}, {}, "sparse attention"),
        ("Glm4MoeMTPModel", {"index_share_for_mtp_iteration": True}, {}, "sparse"),
        ("Qwen3NextMTP", {}, {"index_share_for_mtp_iteration": True}, "sparse"),
        # Fed other states than the target's last, or with KV of the target.
        ("DeepSeekV4MTPModel", {}, {}, "modules of DeepSeekV4MTPModel"),
        ("Gemma4MTPModel", {}, {}, "modules of Gemma4MTPModel"),
        ("Qwen3_5MTP", {"n_predict": 2}, {}, SEVERAL),
    ],
)
def test_modules_of_vllms_own_speculators(name: str, config, settings, why):
    module = SimpleNamespace(
        architectures=[name], hf_config=SimpleNamespace(**config), uses_mrope=False
    )
    given = METHOD | {"num_speculative_tokens": 3, "draft_model_config": module}
    found = find_unsupported(unresolved("a/target", **given | settings))
    assert found is None if why is None else why in found
