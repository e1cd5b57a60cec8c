# SPDX-License-Identifier: Apache-2.0
"""Settings that contradict themselves, the drafter, or the engine."""

from .bad_row import GONE, Bad, config

SETTINGS = [
    Bad("unknown key", "did you mean", spec={"num_spec_tokens": 4}),
    Bad("unknown key like no other", "remove it.", spec={"tree": "wide"}),
    Bad("config is a string", "must be a JSON object, not", spec="models/pard"),
    Bad("config is a list", "must be a JSON object, not", spec=["models/pard"]),
    Bad(
        "K is 0",
        "num_speculative_tokens Input should be greater",
        spec={"num_speculative_tokens": 0},
    ),
    Bad(
        "K is negative",
        "num_speculative_tokens Input should be greater",
        spec={"num_speculative_tokens": -3},
    ),
    Bad(
        "K is a word",
        "num_speculative_tokens Input should be a valid",
        spec={"num_speculative_tokens": "seven"},
    ),
    Bad(
        "K is a fraction",
        "num_speculative_tokens Input should be a valid",
        spec={"num_speculative_tokens": 3.5},
    ),
    Bad(
        "K is null and nothing says it",
        "num_speculative_tokens Input should be a valid",
        spec={"num_speculative_tokens": None},
    ),
    Bad(
        "K is huge",
        "tokens (…) must be below the target's",
        spec={"num_speculative_tokens": 100_000},
    ),
    Bad("K twice", "mutually exclusive", engine={"spec_tokens": 3}),
    Bad("no model", 'has no "model"', spec={"model": GONE, "method": "draft_model"}),
    Bad(
        "no model, no K",
        'has no "model"',
        drafter="eagle3",
        spec={"model": GONE, "num_speculative_tokens": GONE},
    ),
    Bad(
        "empty config",
        'has no "model"',
        spec={"model": GONE, "num_speculative_tokens": GONE},
    ),
    Bad("unknown method", "method Input should be 'ngram'", spec={"method": "eagel3"}),
    Bad(
        "draft model as EAGLE-3 head",
        "fc.weight: it is no EAGLE-3 head",
        "draft",
        spec={"method": "eagle3"},
    ),
    Bad(
        "parallel drafting without a mask token",
        "Unset parallel_drafting",
        "draft",
        spec={"parallel_drafting": True},
    ),
    Bad(
        "parallel drafting with an autoregressive head",
        "Unset parallel_drafting",
        "eagle3",
        spec={"parallel_drafting": True},
    ),
    Bad(
        "parallel drafting is a word",
        "valid boolean",
        spec={"parallel_drafting": "maybe"},
    ),
    Bad(
        "width is 0",
        "parallel_drafting_width Input",
        spec={"parallel_drafting_width": 0},
    ),
    Bad(
        "width above K",
        "must be at most num_speculative_tokens",
        spec={"parallel_drafting_width": 9},
    ),
    Bad(
        "width without parallel drafting",
        "parallel_drafting_width needs a drafter",
        "draft",
        spec={"parallel_drafting_width": 2},
    ),
    Bad(
        "width on Runner V1",
        "parallel_drafting_width does not support Model",
        spec={"parallel_drafting_width": 2},
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Bad(
        "draft_sample_method unknown",
        "draft_sample_method",
        spec={"draft_sample_method": "random"},
    ),
    Bad(
        "rejection method unknown",
        "rejection_sample_method Input",
        spec={"rejection_sample_method": "none"},
    ),
    Bad(
        "synthetic without rates",
        "requires exactly one",
        spec={"rejection_sample_method": "synthetic"},
    ),
    Bad(
        "rates without synthetic",
        "are only valid with",
        spec={"synthetic_acceptance_length": 2.0},
    ),
    Bad(
        "heterogeneous vocabulary with a head",
        "use_heterogeneous_vocab only",
        "eagle3",
        spec={"use_heterogeneous_vocab": True},
    ),
    Bad(
        "adaptive verification with PARD",
        "adaptive draft verification",
        spec={"enable_adaptive_verification": True},
    ),
    Bad("tree of one node", "draft_tree (…) must be from", spec={"draft_tree": 1}),
    Bad("tree of no nodes", "draft_tree Input should be gr", spec={"draft_tree": 0}),
    Bad("tree is huge", "draft_tree Input should be less", spec={"draft_tree": 128}),
    Bad(
        "tree as large as a sequence",
        "draft_tree (…) must be below",
        spec={"draft_tree": 64},
        engine={"max_model_len": 64},
    ),
    Bad(
        "tree of an autoregressive head",
        "in one pass: use",
        "eagle3",
        spec={"draft_tree": 15},
    ),
    Bad(
        "tree of a language model",
        "in one pass: use",
        "draft",
        spec={"method": "draft_model", "draft_tree": 15},
    ),
    Bad(
        "tree in blocks of masks",
        "drafted in one pass, not",
        spec={"draft_tree": 15, "parallel_drafting_width": 2},
    ),
    Bad(
        "tree of drawn drafts",
        "draft_tree does not support …=",
        spec={"draft_tree": 15, "draft_sample_method": "probabilistic"},
    ),
    Bad(
        "tree verified as a block",
        "draft_tree does not support …=",
        spec={"draft_tree": 15, "rejection_sample_method": "block"},
    ),
    Bad(
        "tree on Runner V1",
        "draft_tree does not support Model",
        spec={"draft_tree": 15},
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Bad(
        "tensor_parallel_size",
        "'tensor_parallel_size' is not",
        spec={"tensor_parallel_size": 2},
    ),
    Bad(
        "draft TP unlike the target's",
        "other value than 1",
        spec={"draft_tensor_parallel_size": 2},
    ),
    Bad(
        "draft TP is 0",
        "draft_tensor_parallel_size Input",
        spec={"draft_tensor_parallel_size": 0},
    ),
    Bad(
        "max_model_len above the target's",
        "max_model_len of speculative_config",
        spec={"max_model_len": 4096},
    ),
    Bad("max_model_len is 0", "max_model_len Input", spec={"max_model_len": 0}),
    Bad("max_model_len below K", "the drafter's context", spec={"max_model_len": 3}),
    Bad(
        "schedule is a word",
        'must be "auto" or a list',
        spec={"num_speculative_tokens_per_batch_size": "automatic"},
    ),
    Bad(
        "schedule is empty",
        "for ranges from 1 on",
        spec={"num_speculative_tokens_per_batch_size": []},
    ),
    Bad(
        "schedule starts late",
        "for ranges from 1 on",
        spec={"num_speculative_tokens_per_batch_size": [[4, 8, 2]]},
    ),
    Bad(
        "schedule overlaps",
        "for ranges from 1 on",
        spec={"num_speculative_tokens_per_batch_size": [[1, 8, 4], [4, 16, 2]]},
    ),
    Bad(
        "schedule with a negative length",
        "for ranges from 1 on",
        spec={"num_speculative_tokens_per_batch_size": [[1, 8, -4]]},
    ),
    Bad(
        "auto with ngram",
        '"auto" does not support method',
        spec={
            "model": GONE,
            "method": "ngram",
            "num_speculative_tokens_per_batch_size": "auto",
        },
    ),
    Bad(
        "auto on Runner V1",
        '"auto" does not support Model Runner V1',
        spec={"num_speculative_tokens_per_batch_size": "auto"},
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Bad(
        "auto with an engine of its own on each rank",
        "choose by its own clock",
        spec={"num_speculative_tokens_per_batch_size": "auto"},
        engine={"distributed_executor_backend": "external_launcher"},
    ),
    Bad("unknown quantization", "Unknown quantization", spec={"quantization": "int3"}),
    Bad(
        "quantization of the checkpoint unknown",
        "Unknown quantization",
        breaks=(config(quantization_config={"quant_method": "int3"}),),
    ),
    Bad(
        "quantization unlike the checkpoint's",
        "Quantization method",
        spec={"quantization": "gptq"},
        breaks=(config(quantization_config={"quant_method": "awq"}),),
    ),
    Bad(
        "unknown attention backend",
        "Unknown attention backend",
        spec={"attention_backend": "flashy"},
    ),
    Bad("unknown KV cache dtype", "kv_cache_dtype", spec={"kv_cache_dtype": "fp3"}),
    Bad(
        "unknown load format",
        '"load_format"',
        spec={"draft_load_config": {"load_format": "punch cards"}},
    ),
    Bad(
        "pipeline parallelism, draft model",
        "pipeline_parallel_size",
        "draft",
        engine={"pipeline_parallel_size": 2},
    ),
    Bad(
        "pipeline parallelism, P-EAGLE",
        "pipeline_parallel_size",
        "peagle",
        engine={"pipeline_parallel_size": 2},
    ),
    Bad(
        "LoRA with too small a step",
        "max_num_batched_tokens",
        engine={
            "enable_lora": True,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 512,
        },
    ),
    Bad(
        "prompt_lookup_min above max",
        "prompt_lookup_min",
        spec={
            "model": GONE,
            "method": "ngram",
            "prompt_lookup_min": 5,
            "prompt_lookup_max": 2,
        },
    ),
]
