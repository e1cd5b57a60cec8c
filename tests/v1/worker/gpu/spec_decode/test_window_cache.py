# SPDX-License-Identifier: Apache-2.0
"""When KV cache blocks outside a drafter's window are given back, and which ones."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.core.sink_window import SinkWindowManager, SinkWindowSpec
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.unified.window import WindowedBlockTables
from vllm.v1.worker.gpu.spec_decode.unified.window_cache import (
    Needs,
    settle_window,
    windowed,
    with_draft_window,
)

DEVICE = torch.device(current_platform.device_type)
NEEDS = Needs(window=2048, backlog_tokens=256, in_flight=20, max_len=131072)
GIVEN_BACK, KEPT = "is given back: it saves", "is kept until a request ends: "


def layer(kind=FullAttentionSpec, heads: int = 8, head_size: int = 128, **given):
    shape = {"num_kv_heads": heads, "head_size": head_size, "dtype": torch.bfloat16}
    return kind(block_size=16, **shape, **given)


def layers(
    num_target: int, num_draft: int, target=None, draft=None
) -> dict[str, KVCacheSpec]:
    target, draft = target or layer(), draft or layer()
    specs = {f"target.{i}": target for i in range(num_target)}
    return specs | {f"draft.{i}": draft for i in range(num_draft)}


def names(specs: dict[str, KVCacheSpec]) -> set[str]:
    """The drafter's layers, and one that shares another one's KV cache."""
    return {name for name in specs if name.startswith("draft")} | {"draft.shared"}


SMALL = layer(head_size=64)
# Layers of target and drafter, the drafter's spec, and what is done. 0.20 is the share
# of a 1B draft model in the KV cache of Llama-3.1-8B.
CASES = [
    (32, 16, SMALL, "it saves 20% of the KV cache of a request of 131072 tokens, in 3"),
    (32, 16, None, "it saves 33%"),
    (28, 28, SMALL, "it saves 33%"),
    (29, 28, None, "it saves 48%"),
    (24, 8, layer(heads=4), "it saves 14%"),
    # The target's layers are padded to 84, or the drafter's to 36.
    (64, 28, None, "contexts within it would take 22% more"),
    (36, 28, None, "contexts within it would take 12% more"),
    (36, 12, layer(heads=1, head_size=64), "it would save only 2%"),
    (32, 1, None, "it would take 33 KV cache groups, more than 4"),
    (32, 4, None, "it would take 9 KV cache groups, more than 4"),
    (6, 4, SMALL, "contexts within it would take 25% more"),
    (32, 16, layer(head_size=96), "blocks of drafter and target cannot be equally"),
    (32, 16, layer(SlidingWindowSpec, sliding_window=512), "layers differ in the kind"),
    (32, 16, layer(sliding_window=512), "layers differ in the kind"),
    (32, 16, layer(MLAAttentionSpec, heads=1), "layers differ in the kind"),
    (0, 16, None, "layers differ in the kind"),
    (32, 0, None, "layers differ in the kind"),
]


@pytest.mark.parametrize("num_target, num_draft, draft, why", CASES)
def test_blocks_are_given_back_where_it_pays(num_target, num_draft, draft, why: str):
    specs = layers(num_target, num_draft, draft=draft)
    outcome = settle_window(specs, names(specs), NEEDS)
    assert outcome.why.startswith(why)
    assert (outcome.spec is not None) == why.startswith("it saves")


def test_target_of_several_kinds_stays():
    specs = layers(32, 16) | {"target.0": layer(SlidingWindowSpec, sliding_window=64)}
    assert settle_window(specs, names(specs), NEEDS).spec is None


@pytest.mark.parametrize(
    "max_len, saved", [(2048, 0), (3000, 4), (4096, 8), (16384, 17)]
)
def test_short_contexts_stay(max_len: int, saved: int):
    specs = layers(32, 16, draft=SMALL)
    outcome = settle_window(specs, names(specs), NEEDS._replace(max_len=max_len))
    verb = "saves" if outcome.spec else "would save only"
    assert outcome.why.startswith(f"it {verb} {saved}% of")
    assert (outcome.spec is not None) == (saved >= 5)


@pytest.mark.parametrize("num_target, num_draft, draft, why", CASES[:5])
def test_groups_are_those_that_vllm_makes(num_target, num_draft, draft, why: str):
    specs = layers(num_target, num_draft, draft=draft)
    own, outcome = names(specs), settle_window(specs, names(specs), NEEDS)
    given = {name: outcome.spec if name in own else specs[name] for name in specs}
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC
        ),
        speculative_config=None,
        parallel_config=SimpleNamespace(),
    )
    groups = get_kv_cache_groups(config, given)
    size = max(len(group.layer_names) for group in groups)
    assert outcome.why.endswith(f"in {len(groups)} groups of {size} layers")
    for group in groups:
        is_own = {name in own for name in group.layer_names}
        assert is_own == {isinstance(group.kv_cache_spec, SinkWindowSpec)}


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 300])
@pytest.mark.parametrize("backlog", [0, 24])
def test_what_a_step_shows_is_held(window: int, backlog: int):
    """Whatever number of tokens is processed, and rows the backlog has; the blocks that
    are not held any more are all the others."""
    size, room, longest = 16, 6, 640
    needs = Needs(window, backlog, in_flight=0, max_len=longest)
    pool = BlockPool(1 + longest // size, enable_caching=False, hash_block_size=size)
    spec = windowed(layer(), needs)
    manager = SinkWindowManager(
        spec,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=size,
    )
    target = BlockTables([size], 1, 64, [longest // size], DEVICE)
    tables = WindowedBlockTables(target, room, [0], window)
    seen: set[int] = set()
    for known in range(longest - 12):
        manager.allocate_new_blocks("a", min(known + 12, longest), known)
        manager.remove_skipped_blocks("a", known)
        ids = [block.block_id for block in manager.req_to_blocks["a"]]
        row = target.input_block_tables[0][0]
        row.fill_(-1)
        row[: len(ids)] = torch.tensor([each or -2 for each in ids])
        # The drafter's first slot is the next token, or the first one of its backlog.
        first = max(known - backlog, 0)
        starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([first + 3], dtype=torch.int32, device=DEVICE)
        batch = SimpleNamespace(query_start_loc=starts, seq_lens=lens)
        tables.show(batch, is_first=True)
        shown = tables.input_block_tables[0][0, : -(-int(lens[0]) // size)].tolist()
        assert -2 not in shown
        seen |= {first - int(tables.dropped[0])}
        held = [index for index, each in enumerate(ids) if each]
        begin = max(known + 1 - max(window, 2) - backlog, 0) // size
        assert held == sorted({0, *range(begin, len(ids))})
        if first and first % size == 0:
            assert ids[(first - 1) // size]  # that of PARD-2's preceding state
    assert len(seen) > 16


def drafter(specs: dict[str, KVCacheSpec], window=2048, backlog=None, **off):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=off.get("hybrid", False)
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=off.get("stages", 1)),
        kv_transfer_config=off.get("connector"),
        model_config=SimpleNamespace(max_model_len=131072),
        max_concurrent_batches=2,
        num_speculative_tokens=5,
        num_lookahead_tokens=5,
    )
    return SimpleNamespace(
        target_config=config,
        draft_window=window,
        draft_attn_layer_names=names(specs),
        backlog=backlog,
    )


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "is given back: it saves 20%"),
        ({"hybrid": True}, f"{KEPT}the hybrid KV cache manager is off"),
        ({"stages": 2}, f"{KEPT}it does not support pipeline parallelism"),
        ({"connector": object()}, f"{KEPT}it does not support KV connectors"),
    ],
)
def test_one_line_says_what_is_done(caplog_vllm, given, said: str):
    caplog_vllm.set_level("INFO", logger="vllm")
    specs = layers(32, 16, draft=SMALL)
    found = with_draft_window(drafter(specs, **given), specs)
    assert f"KV cache outside draft_window {said}" in caplog_vllm.text
    assert found.keys() == specs.keys()
    assert (found != specs) == ("given back" in said)


@pytest.mark.parametrize("backlog, held", [(None, 2048), (object(), 2048 + 256)])
def test_blocks_of_a_backlog_are_held(backlog, held: int):
    specs = layers(32, 16, draft=SMALL)
    found = with_draft_window(drafter(specs, backlog=backlog), specs)
    assert found["draft.3"].sliding_window == held
    assert found["draft.3"].backlog_tokens == held - 2048
    assert found["target.3"] is specs["target.3"]


def test_nothing_changes_without_a_window():
    specs = layers(32, 16)
    assert with_draft_window(drafter(specs, window=None), specs) is specs
    for other in (None, object.__new__(DFlashSpeculator)):
        assert with_draft_window(other, specs) is specs
