# SPDX-License-Identifier: Apache-2.0
"""What we call and override in the base is still there, by the names that we use."""

import inspect
from dataclasses import fields
from importlib import import_module

import pytest

from vllm.config.vllm import UNSUPPORTED
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.config import SpeculativeConfig
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import (
    BaseSpeculator,
    DraftModelSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator
from vllm.v1.worker.utils import AttentionGroup, get_uniform_decode_token_count

# Callable of the base: the positional arguments we pass, and the keywords.
CALLED = [
    (DraftModelSpeculator.__init__, "self vllm_config device", ""),
    (DraftModelSpeculator.load_model, "self target_model", ""),
    (
        DraftModelSpeculator.set_attn,
        "self model_state kv_cache_config block_tables",
        "",
    ),
    (
        DraftModelSpeculator._update_draft_decode_metadata,
        "self attn_metadata num_reqs",
        "",
    ),
    (
        build_attn_metadata,
        "",
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu "
        "max_query_len seq_lens max_seq_len block_tables slot_mappings kv_cache_config "
        "positions is_prefilling for_cudagraph_capture",
    ),
    (
        CudaGraphManager.__init__,
        "self vllm_config device cudagraph_mode",
        "decode_query_len",
    ),
    (CudaGraphManager.capture, "self create_forward_fn progress_bar_desc", ""),
    (CudaGraphManager.run_fullgraph, "self desc", ""),
    (CudaGraphManager.run_pw_graph, "self model model_inputs", ""),
    (AttentionGroup.map_to_kernel_block_table, "self block_table", ""),
    (
        get_uniform_decode_token_count,
        "num_reqs num_tokens max_query_len decode_graph_eligible",
        "",
    ),
    (get_block_table_width, "max_num_blocks block_size", ""),
    (
        DraftModelSpeculator._build_attn_metadata,
        "self num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound",
        "step slot_mappings",
    ),
    (
        DraftModelSpeculator.sample_draft,
        "self hidden_states sample_src_positions idx_mapping temperature seeds "
        "draft_step draft_logits",
        "",
    ),
    (DraftModelSpeculator._prepare_eplb_forward, "self num_unpadded_tokens", ""),
    (get_model, "", "vllm_config prefix"),
    (load_eagle_model, "target_model vllm_config", ""),
    (build_slot_mappings_by_layer, "slot_mappings kv_cache_config", ""),
    (BatchExecutionDescriptor, "", "cg_mode num_tokens num_reqs"),
    (InputBuffers, "max_num_reqs max_num_tokens device", ""),
    (get_safetensors_params_metadata, "model", "revision"),
    (DefaultModelLoader.__base__.load_weights, "self model model_config", ""),
    (DefaultModelLoader.__base__.get_all_weights, "self model_config model", ""),
    (SpeculativeConfig.__mro__[2].hf_config_override, "hf_config", ""),
]
OWN = set(vars(UnifiedSpeculator))
# What the base's __init__ sets on every instance, and ours sets anew.
ATTRIBUTES = {"max_model_len", "draft_max_seq_len", "input_buffers", "idx_mapping"}
# Ours alone; all else in OWN overrides something of the base.
NEW = {"limit", "tapped_layers", "sample", "prepare_later", "run_pass", "forward"}


def names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_filtered_feature_is_still_named_so():
    """Else the seam's filter would silently do nothing."""
    upstream = import_module("vllm._upstream.config.vllm")
    assert f'"{UNSUPPORTED}"' in inspect.getsource(upstream)


@pytest.mark.parametrize(
    "function, positional, keywords", CALLED, ids=lambda x: getattr(x, "__name__", "")
)
def test_called(function, positional: str, keywords: str):
    found = names(function)
    assert found[: len(positional.split())] == positional.split()
    assert set(keywords.split()) <= set(found)
    bound = inspect.signature(function).bind_partial(
        *positional.split(), **dict.fromkeys(keywords.split())
    )
    missing = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty and name not in bound.arguments
    ]
    assert missing == [] or function is DraftModelSpeculator.set_attn


def test_propose_takes_what_the_base_passes():
    assert names(UnifiedSpeculator.propose) == names(BaseSpeculator.propose)


def overridden() -> list[str]:
    public = {name for name in OWN if not name.startswith("_")}
    return sorted(public - NEW)


@pytest.mark.parametrize("name", overridden())
def test_overridden(name: str):
    """Every public member that is not declared new stands on one of the base."""
    base = inspect.getattr_static(DraftModelSpeculator, name)
    ours = inspect.getattr_static(UnifiedSpeculator, name)
    assert isinstance(base, property) == isinstance(ours, property)
    if inspect.isfunction(base):
        inspect.signature(ours).bind(*names(base))


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_attribute_of_the_base(name: str):
    """Set by its `__init__`, or, from 0.33.0 on, computed there too."""
    is_set = f"self.{name} = " in inspect.getsource(DraftModelSpeculator.__init__)
    known = inspect.getattr_static(DraftModelSpeculator, name, None)
    assert is_set or isinstance(known, property)


def test_fields_that_we_read():
    assert {"num_reqs", "num_tokens_across_dp"} <= {f.name for f in fields(DPSyncState)}
    read = "num_reqs num_tokens idx_mapping input_ids positions query_start_loc "
    read += "query_start_loc_np num_scheduled_tokens seq_lens_cpu_upper_bound"
    assert set(read.split()) <= {f.name for f in fields(InputBatch)}
    set_by_init = set(inspect.getsource(BlockTables).split("self.")[1:])
    for name in ("input_block_tables", "block_sizes", "num_blocks", "block_tables"):
        assert any(part.startswith((f"{name}:", f"{name} =")) for part in set_by_init)


def test_the_runner_passes_set_attn_its_arguments_in_order():
    source = inspect.getsource(GPUModelRunner.initialize_kv_cache)
    call = "".join(source.partition("speculator.set_attn(")[2].split())
    assert call.startswith("self.model_state,self.kv_cache_config,self.block_tables,")
