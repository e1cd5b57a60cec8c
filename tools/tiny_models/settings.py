# SPDX-License-Identifier: Apache-2.0
"""All sizes, step counts and seeds of the tiny models."""

from dataclasses import dataclass, replace
from pathlib import Path

SEED = 20260101
VOCAB_SIZE = 2560
BOS, EOS, MASK = "<|bos|>", "<|eos|>", "<|mask|>"
BOS_ID, EOS_ID, MASK_ID = 0, 1, 2

# Draft tokens that the drafters are trained for.
K = 7
# Depths trained: one more than K, so that K is not the last one.
DEPTHS = 8
# Hidden states fed to the heads, numbered as in vLLM: i is the input of layer i. Set
# explicitly because the default (2, L // 2, L - 3) has 3 twice for six layers.
AUX_LAYERS = (1, 3, 5)
# States fed to PARD-2, numbered as in transformers: the last one is after the norm.
PARD2_LAYERS = (-1, -3)
# Scale of their projection, as in published drafters: states are far larger than
# embeddings, and would dominate them at the learning rate of the other weights.
PARD2_SCALE = 0.02
# Tokens that the EAGLE-3 and P-EAGLE heads can draft.
DRAFT_VOCAB_SIZE = 1536
# Equal parts of the target's distribution and of its greedy choice.
LOSS = '{"kl_div": 0.5, "ce": 0.5}'


@dataclass(frozen=True)
class Shape:
    """Size of one Llama decoder; the head size is 64, which suits FlashAttention."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Plan:
    """Training of one model: ``batch`` sequences of ``length`` tokens per step."""

    steps: int
    batch: int
    length: int
    lr: float


SHAPES = {
    "target": Shape(6, 256, 512, 4, 2),
    "draft": Shape(2, 128, 384, 2, 1),
    # Parallel drafters must look past several masks for the text, which takes depth.
    "pard": Shape(4, 192, 384, 3, 1),
    "eagle3": Shape(1, 256, 512, 4, 2),
    "peagle": Shape(4, 256, 384, 4, 2),
}
PLANS = {
    "target": Plan(1600, 64, 1024, 2e-3),
    "draft": Plan(4000, 64, 512, 3e-3),
    "pard_text": Plan(2500, 64, 512, 3e-3),
    "pard": Plan(6000, 24, 512, 1.5e-3),
    "pard2": Plan(10000, 24, 512, 1e-3),
    "eagle3": Plan(9300, 16, 512, 1.5e-3),
    "peagle": Plan(11700, 32, 512, 2e-3),
}
# Rounds of text written by the target: prompt length, temperature (0: greedy).
ROUNDS = ((32, 0.0), (64, 0.0), (128, 0.0), (256, 0.0), (96, 0.0), (48, 0.7))
ROUND_SEQUENCES = 4096


@dataclass(frozen=True)
class Run:
    """One invocation: where to read and write, and how much to train."""

    out: Path
    work: Path
    stdlib: Path
    device: str
    scale: float = 1.0
    batch_scale: float = 1.0

    def plan(self, name: str) -> Plan:
        plan = PLANS[name]
        steps = max(2, round(plan.steps * self.scale))
        batch = max(1, round(plan.batch * self.batch_scale))
        return replace(plan, steps=steps, batch=batch)

    def model_dir(self, name: str) -> Path:
        return self.out / name
