# SPDX-License-Identifier: Apache-2.0
"""Settings that contradict themselves, the drafter, or the engine."""

from .bad_row import GONE, Row, config

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
NGRAM = {"model": GONE, "method": "ngram"}
CLASS = {"model": "somewhere.proposer.Proposer", "method": "custom_class"}
LORA = {"enable_lora": True, "max_num_seqs": 256, "max_num_batched_tokens": 512}


def schedule(says: str, value, **more):
    return Row(says, num_speculative_tokens_per_batch_size=value, **more)


SETTINGS = [
    # Keys, and who drafts.
    Row("did you mean", num_spec_tokens=4),
    Row("remove it.", tree="wide"),
    Row("must be a JSON object, not", spec=["models/pard"]),
    Row('has no "model"', model=GONE, method="draft_model"),
    Row('has no "model"', model=GONE, num_speculative_tokens=GONE),
    Row("method Input should be 'ngram'", method="eagel3"),
    Row("fc.weight: it is not an EAGLE-3 head", drafter="draft", method="eagle3"),
    Row("prompt_lookup_min", **NGRAM, prompt_lookup_min=5, prompt_lookup_max=2),
    # How many tokens.
    Row("tokens Input should be greater", num_speculative_tokens=0),
    Row("tokens Input should be a valid", num_speculative_tokens=3.5),
    Row("tokens Input should be a valid", num_speculative_tokens=None),
    Row("tokens (…) must be below the target's", num_speculative_tokens=100_000),
    Row("mutually exclusive", engine={"spec_tokens": 3}),
    Row("max_model_len of speculative_config", max_model_len=4096),
    Row("max_model_len Input", max_model_len=0),
    Row("the drafter's context", max_model_len=3),
    Row("max_num_batched_tokens", engine=LORA),
    schedule('must be "auto" or a list', "automatic"),
    schedule("for ranges from 1 on", []),
    schedule("for ranges from 1 on", [[1, 8, 4], [4, 16, 2]]),
    schedule('"auto" does not support method', "auto", **CLASS),
    schedule('"auto" does not support Model Runner V1', "auto", env=V1),
    schedule(
        "choose by its own clock",
        "auto",
        engine={"distributed_executor_backend": "external_launcher"},
    ),
    # How many of them a pass.
    Row("Unset parallel_drafting", drafter="draft", parallel_drafting=True),
    Row("Unset parallel_drafting", drafter="eagle3", parallel_drafting=True),
    Row("valid boolean", parallel_drafting="maybe"),
    Row("parallel_drafting_width Input", parallel_drafting_width=0),
    Row("must be at most num_speculative_tokens", parallel_drafting_width=5),
    Row(
        "parallel_drafting_width needs a drafter",
        drafter="draft",
        parallel_drafting_width=2,
    ),
    Row("parallel_drafting_width needs a drafter", **NGRAM, parallel_drafting_width=2),
    Row(
        "parallel_drafting_width does not support Model",
        parallel_drafting_width=2,
        env=V1,
    ),
    # How they are drawn and verified.
    Row("draft_sample_method", draft_sample_method="random"),
    Row("rejection_sample_method Input", rejection_sample_method="none"),
    Row("requires exactly one", rejection_sample_method="synthetic"),
    Row("are only valid with", synthetic_acceptance_length=2.0),
    schedule(
        "adaptive draft verification", [[1, 8, 4]], enable_adaptive_verification=True
    ),
    Row(
        "draft_tree does not support enable_adaptive_verification",
        draft_tree=31,
        enable_adaptive_verification=True,
    ),
    Row("draft_tree (…) must be from", draft_tree=3),
    Row("draft_tree Input should be gr", draft_tree=0),
    Row("draft_tree Input should be less", draft_tree=128),
    Row("draft_tree (…) must be below", draft_tree=64, engine={"max_model_len": 64}),
    Row("in one pass: use", drafter="eagle3", draft_tree=15),
    Row("in one pass: use", drafter="draft", method="draft_model", draft_tree=15),
    Row("in one pass: use", **NGRAM, draft_tree=15),
    Row("drafted in one pass, not", draft_tree=15, parallel_drafting_width=2),
    Row(
        "draft_tree does not support …=",
        draft_tree=15,
        draft_sample_method="probabilistic",
    ),
    Row(
        "draft_tree does not support …=",
        draft_tree=15,
        rejection_sample_method="block",
    ),
    Row("draft_tree does not support Model", draft_tree=15, env=V1),
    # How the drafter is loaded and run.
    Row("use_heterogeneous_vocab only", drafter="eagle3", use_heterogeneous_vocab=True),
    Row("'tensor_parallel_size' is not", tensor_parallel_size=2),
    Row("other value than 1", draft_tensor_parallel_size=2),
    Row("draft_tensor_parallel_size Input", draft_tensor_parallel_size=0),
    *(
        Row(
            "pipeline_parallel_size",
            drafter=drafter,
            engine={"pipeline_parallel_size": 2},
        )
        for drafter in ("draft", "peagle")
    ),
    Row("Unknown quantization", quantization="int3"),
    Row(
        "Unknown quantization",
        config(quantization_config={"quant_method": "int3"}),
    ),
    Row(
        "Quantization method",
        config(quantization_config={"quant_method": "awq"}),
        quantization="gptq",
    ),
    Row("Unknown attention backend", attention_backend="flashy"),
    Row("kv_cache_dtype", kv_cache_dtype="fp3"),
    Row('"load_format"', draft_load_config={"load_format": "punch cards"}),
]
