# SPDX-License-Identifier: Apache-2.0
"""How servers are started."""

import sys
from pathlib import Path

import pytest

from benchmarks.spec_decode.plan import Setup, recording
from benchmarks.spec_decode.results import EngineKey
from benchmarks.spec_decode.serving import as_flags, keys_of, parse
from benchmarks.spec_decode.shapes import MODES, write_shapes
from benchmarks.spec_decode.tokenizer import write_tokenizer


@pytest.mark.parametrize("mode", MODES)
def test_flags_are_those_of_vllm_serve(mode: str, tmp_path: Path):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    models = write_shapes("llama-3.1-8b", tmp_path)
    setup = Setup({}, models, "cuda", 64, 5.0, {"gpu_memory_utilization": 0.5})
    flags = as_flags(
        setup.llm_args(EngineKey("ours", mode, 7 if mode != "none" else 0))
    )
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    assert found.load_format == "dummy"
    assert found.enable_prefix_caching is False
    assert found.gpu_memory_utilization == 0.5
    method = (found.speculative_config or {}).get("method")
    assert method == MODES[mode].get("method")


def test_a_tree_is_served_beside_its_chain(monkeypatch, tmp_path: Path):
    flags = {"site": f"ours={sys.executable}", "implementations": "ours"}
    flags |= {"trace": "t0.5", "draft-tree": "31", "num-speculative-tokens": "8"}
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["serving.py", *given])
    chain, tree = keys_of("peagle", parse())
    models = write_shapes("llama-3.1-8b", tmp_path)
    spec = Setup({}, models, "cuda", 64, 5.0, {}).llm_args(tree)["speculative_config"]
    assert (spec["draft_tree"], spec["num_speculative_tokens"]) == (31, 8)
    labels = [recording("recorded-t0.5", key) for key in (chain, tree)]
    assert labels[0] == labels[1] is not None  # both read the same rows


def test_tokenizer_reads_what_it_writes(tmp_path: Path):
    from transformers import AutoTokenizer

    models = write_shapes("llama-3.1-8b", tmp_path)
    write_tokenizer(models["target"], 1000)
    tokenizer = AutoTokenizer.from_pretrained(models["target"])
    tokens = [1, 999, 7, 7]
    assert tokenizer(tokenizer.decode(tokens))["input_ids"] == tokens
