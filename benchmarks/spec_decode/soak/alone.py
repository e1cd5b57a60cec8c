# SPDX-License-Identifier: Apache-2.0
"""The target alone, in a process of its own, called with JOB and RESULT.

What it answers to each prompt is computed once, before any traffic. A shorter greedy
answer is the beginning of a longer one.
"""

import json
import random
import sys
import sysconfig
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.spec_decode.correctness import gaps
from vllm import LLM, SamplingParams

STARTS = 12  # prompts share so many beginnings, for the prefix cache


def prompts(model: str, held_out: str, count: int, longest: int) -> list[list[int]]:
    """Beginnings, of random length, of pieces of held-out standard modules."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    library, tokens = Path(sysconfig.get_path("stdlib")), []
    for name in json.loads(Path(held_out).read_text()):
        if (file := library / f"{name}.py").is_file():
            tokens += tokenizer(file.read_text(), add_special_tokens=False).input_ids
    draw = random.Random(count)
    starts = [draw.randrange(len(tokens) - longest) for _ in range(STARTS)]
    return [
        tokens[start : start + draw.randint(1, longest)]
        for start in (starts[i % STARTS] for i in range(count))
    ]


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    model = job["engine"]["model"]
    found = prompts(model, job["held_out"], job["prompts"], job["longest_prompt"])
    llm = LLM(**job["engine"])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["longest_output"], ignore_eos=True, logprobs=2
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in found], sampling, use_tqdm=False
    )
    answers = [
        {
            "prompt": prompt,
            "tokens": list(output.outputs[0].token_ids),
            "gaps": gaps(output.outputs[0].logprobs),
        }
        for prompt, output in zip(found, outputs, strict=True)
    ]
    result_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
