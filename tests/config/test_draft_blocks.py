# SPDX-License-Identifier: Apache-2.0
"""Published drafters of the DFlash family: what is read of their files, and that what
vLLM's speculators would run in another way than it was trained is refused."""

import json

import pytest
import torch

from tests.checkpoints.blocks import BLOCKS, REDUCED, block_shapes, read
from tests.checkpoints.families import MASK, VOCAB, write_target
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.drafter.length import is_auto
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.v1.worker.gpu.spec_decode.tapped_layers import in_listed_order
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from .bad_row import GONE, config
from .specs import engine_config


@pytest.fixture
def configure(models, tmp_path_factory, monkeypatch):
    """Creates the engine config for a drafter of `published/`, with changes to its
    config.json, and to the speculative config."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    target = write_target(
        "qwen3", tmp_path_factory.mktemp("target"), models / "target", False
    )
    folder = tmp_path_factory.mktemp("drafter")

    def run(name: str, changes: dict | None = None, **spec) -> VllmConfig:
        (folder / "config.json").write_text(json.dumps(read(name)))
        config(**changes or {})(folder)
        return engine_config(
            target, {"model": str(folder), **spec}, load_format="dummy"
        )

    return run


@pytest.mark.parametrize("name", BLOCKS)
def test_published(name: str, configure):
    made, engine = BLOCKS[name], configure(name)
    spec, drafter = engine.speculative_config, engine.speculative_config.drafter
    hf_config = spec.draft_model_config.hf_config
    assert spec.method == made.method
    assert spec.draft_model_config.architectures == [made.architecture]
    assert drafter.num_speculative_tokens == made.num_drafts
    rows = made.num_drafts + made.has_known_row
    assert engine.num_lookahead_tokens == rows
    assert get_parallel_drafting_token_id(hf_config) == MASK
    assert drafter.tapped_layers == (2, 4, 7)
    rows = getattr(hf_config, "draft_vocab_size", None) or VOCAB
    assert rows == (REDUCED if "d2t" in block_shapes(name) else VOCAB)
    assert drafter.no_lattice == made.no_lattice
    assert drafter.can_draft_trees == (made.no_lattice is None)
    found = [_dflash_layer_causal(hf_config, layer) for layer in (0, 1)]
    assert found == list(made.causal)


@pytest.mark.parametrize("name", BLOCKS)
def test_tensors_have_places(name: str, configure, single_rank):
    """In vLLM's model of the drafter, and of their shapes."""
    engine = configure(name)
    draft = engine.speculative_config.draft_model_config
    with set_current_vllm_config(engine), torch.device("meta"):
        model = get_model_cls(draft)(vllm_config=engine)
        shapes = block_shapes(name)
        model.load_weights((each, torch.empty(shapes[each])) for each in shapes)


def test_length_of_block_is_a_part_of_the_graph(configure):
    """Regression: with DFlash2, what was compiled for another K was taken from the
    cache, whose convolutions reach into other requests' rows."""
    found = [configure("dflash2-zlab", num_speculative_tokens=k) for k in (3, 5)]
    assert len({engine.compute_hash() for engine in found}) == 2


AS_DFLASH = {"architectures": ["DFlashDraftModel"]}
REFUSED = [
    # Heads that no drafter in vLLM has: Domino's `prefix_gru`, by both its names, and
    # DSpark as ModelOpt writes it.
    ("domino-specforge", {}, {}, r"\['DominoDraftModel'\] are not supported"),
    ("domino-specforge", AS_DFLASH, {}, "projector_type in .* is 'domino', which"),
    ("dspark-specforge", AS_DFLASH, {}, "projector_type in .* is 'dspark', which"),
    ("dspark-specforge", {"dflash_config__markov_head_type": "rnn"}, {}, "'rnn', whi"),
    ("dspark-deepseek", {"architectures": ["KimiK3DSparkModel"]}, {}, "not supported"),
    # Rows of DSpark: without an error, about 1.06 tokens a step.
    ("dflash-zlab", {"sample_from_anchor": True}, {}, "is True, which"),
    # XPress: vLLM's kernel reads the mixer of a block of another length wrongly, and
    # drawn drafts would be verified as if from no distribution.
    ("xpress-uiuc", {}, {"num_speculative_tokens": 5}, r"\(5\) must be 15 with"),
    (
        "xpress-uiuc",
        {},
        {"draft_sample_method": "probabilistic"},
        'not support draft_sample_method="probabilistic"',
    ),
    # Layers that the target lacks.
    (
        "dflash-zlab",
        {"dflash_config__target_layer_ids": [1, 3, 8]},
        {},
        r"target_layer_ids \+ 1 of .* \[2, 4, 9\] must be different layers from 0 to 8",
    ),
    ("dspark-deepseek", {"target_hidden_size": 256}, {}, "must be the target's hidden"),
]


@pytest.mark.parametrize("name, changes, spec, says", REFUSED)
def test_refused(name: str, changes: dict, spec: dict, says: str, configure):
    with pytest.raises(ValueError, match=says):
        configure(name, changes, **spec)


def test_layers_in_another_order(configure, monkeypatch):
    """Model Runner V2 feeds them as listed; V1 would in ascending order."""
    unsorted = {"dflash_config__target_layer_ids": [6, 1, 3]}
    engine = configure("dflash-zlab", unsorted)
    assert engine.speculative_config.drafter.tapped_layers == (7, 2, 4)
    states = in_listed_order([20, 40, 70], engine.speculative_config)
    assert states == [70, 20, 40]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match=r"\[7, 2, 4\] are not in ascending order"):
        configure("dflash-zlab", unsorted)


@pytest.mark.parametrize(
    "name, changes, k",
    [
        ("dspark-deepseek", {"sample_from_anchor": False}, 6),
        ("dspark-deepseek", {"hf_overrides": {"sample_from_anchor": False}}, 6),
        ("dspark-specforge", {"dflash_config__sample_from_anchor": False}, 7),
        # Before speculators wrote the key, it trained DSpark with DFlash's rows.
        ("speculators-dspark", {"sample_from_anchor": GONE}, 7),
        ("xpress-uiuc", {"xpress_block_size": 8, "block_size": GONE}, 7),
    ],
)
def test_length_follows_the_rows(name: str, changes: dict, k: int, configure):
    """Of the file, or as overridden: its tensors do not tell how it was trained."""
    given = changes if "hf_overrides" in changes else {"changes": changes}
    engine = configure(name, **given)
    assert engine.speculative_config.drafter.num_speculative_tokens == k
    assert engine.num_lookahead_tokens == k + 1  # queries: the first is a known token


def test_trees_and_lengths_of_a_block(configure, monkeypatch):
    """The engine chooses up to the block's length, unless trees are asked for."""
    assert is_auto(configure("dflash-zlab").speculative_config)
    fixed = configure("dspark-deepseek", {"dspark_draft_topk": 8})
    assert not is_auto(fixed.speculative_config)
    schedule = [[1, 8, 31], [9, 64, 2]]
    for more in ({}, {"num_speculative_tokens_per_batch_size": schedule}):
        tree = configure("dflash-zlab", draft_tree=31, **more)
        drafter = tree.speculative_config.drafter
        assert (drafter.num_speculative_tokens, drafter.num_nodes) == (15, 31)
        assert not is_auto(tree.speculative_config)
        assert tree.num_lookahead_tokens == 16  # its queries, whatever the tree's nodes
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not is_auto(configure("dflash-zlab").speculative_config)
    with pytest.raises(ValueError, match="draft_tree does not support Model Runner V1"):
        configure("dflash-zlab", draft_tree=31)


@pytest.mark.parametrize("name", ["dflash-zlab", "dspark-deepseek", "xpress-uiuc"])
@pytest.mark.parametrize("more", [0, 5])
def test_block_has_no_more_rows(name: str, more: int, configure, caplog_vllm):
    """vLLM itself drafts with rows that were never trained."""
    k = BLOCKS[name].num_drafts
    engine = configure(name, num_speculative_tokens=k + more)
    assert engine.speculative_config.drafter.num_speculative_tokens == k
    told = [each.getMessage() for each in caplog_vllm.records]
    assert any(f"is {k + 5}, but" in each for each in told) == bool(more)
