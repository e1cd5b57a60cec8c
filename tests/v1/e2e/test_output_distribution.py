# SPDX-License-Identifier: Apache-2.0
"""Sampled output against the target's exact distribution, by a chi-square test.

The models are random. The target's vocabulary is so small that each possible output of
three tokens is counted. Its exact distribution is computed in plain PyTorch, from the
logits after every possible prefix. Drafts that are seldom accepted would prove little,
so the acceptance length is checked, too; and the test must fail for a rule that accepts
every draft.

`VLLM_TEST_SAMPLES` is the number of outputs that are sampled for each setting.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.tensors import (
    EMBED,
    LM_HEAD,
    Tensors,
    shapes_of,
    write_checkpoint,
)
from tests.checkpoints.words import save_words
from vllm.sampling_params import StructuredOutputsParams

from .made_up_times import make_up_times
from .oracle import load_model
from .runner import Request, Served
from .test_unified_speculator import only_fast

# Words for grammars; token 0 ends a text.
WORDS = ("</s>", "a", "b", "c", "d", "e")
VOCAB = len(WORDS)
HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM = 64, 64, 2, 32
LAYERS = 4
AUX_LAYERS = [1, 2, 3]
MASK = VOCAB - 1
# Those with "-small" know only some of the tokens, with ids of their own.
MODES = ("draft", "pard", "pard2", "eagle3", "peagle", "draft-small", "eagle3-small")
KNOWN_TOKENS = (0, 1, 3, 4)
# Vocabulary of small draft models: these tokens, and words that the target lacks.
SMALL_WORDS = ("x", "c", "</s>", "y", "d", "a")
# Weight of a layer's output beside the embedding, and of hidden states in a head.
LAYERS_SHARE = 0.3
# Noise in the drafters' weights, and scale of what PARD-2 adds to its embeddings.
NOISE = 0.1

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
    "norm_before_residual": True,
}
PARD2_SCALE = 0.02
PARD2 = {
    "spd_type": "pard2",
    "pard2_scale": PARD2_SCALE,
    "pard2_target_layers": [-1, -3],
    "pard2_target_dim": 2 * HIDDEN,
    "pard2_proj_bias": False,
}

PROMPT = [1, 2]
LENGTH = 3
NUM_DRAFTS = 3
# With it about one in some hundred runs of all tests fails by chance.
SIGNIFICANCE = 1e-4
# The chi-square test is not reliable with fewer expected outcomes in a cell.
FEWEST_EXPECTED = 5.0
# Acceptance length that all drafters reach, up to this temperature.
LEAST_ACCEPTANCE_LENGTH, WARMEST = 1.15, 1.0
# With a seed, block verification's drafts do not have the noise of the target.
LEAST_WITHOUT_SHARED_NOISE = 1.1
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"T{t}": {"temperature": t} for t in (0.3, 0.7, 1.0, 1.5)},
    "T1.0 top-p 0.7": {"temperature": 1.0, "top_p": 0.7},
    "T1.0 seeded": {"temperature": 1.0, "seed": 0},
    # The allowed tokens at each position. Half of the drafts after the first are not
    # allowed, and nearly all others are token 4.
    "T1.0 grammar": {
        "temperature": 1.0,
        "grammar": ((4,), (1, 4), (1, 4)),
        "logit_bias": {4: -1.0},
    },
}
METHODS = {
    "greedy": {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "block": {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    },
    "tree": {"draft_tree": 8},
}
ADAPTIVE = {"enable_adaptive_verification": True}
METHODS |= {
    f"adaptive {name}": METHODS[name] | ADAPTIVE for name in ("probabilistic", "block")
}
WRONG_RULE = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0] * NUM_DRAFTS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def logits(folders) -> list[torch.Tensor]:
    """[V], [V, V] and [V, V, V] of the output's tokens, by those before."""
    known = torch.cartesian_prod(*(LENGTH - 1) * [torch.arange(VOCAB)])
    prompts = torch.tensor(PROMPT).expand(len(known), -1)
    with torch.inference_mode():
        rows = load_model(folders["target"])(torch.cat([prompts, known], 1)).logits
    rows = rows.double().view(VOCAB, VOCAB, -1, VOCAB)
    first = len(PROMPT) - 1
    return [rows[0, 0, first], rows[:, 0, first + 1], rows[:, :, first + 2]]


def chances(setting: dict[str, Any], logits: list[torch.Tensor]) -> torch.Tensor:
    """[V, V, V], the probability of every output."""
    whole = torch.ones((), dtype=torch.float64)
    for place, rows in enumerate(logits):
        rows = rows.clone()
        for token, bias in setting.get("logit_bias", {}).items():
            rows[..., token] += bias
        if "grammar" in setting:
            allowed = setting["grammar"][place]
            never = [token for token in range(VOCAB) if token not in allowed]
            rows[..., never] = -torch.inf
        here = torch.softmax(rows / setting["temperature"], dim=-1)
        # The smallest set of likeliest tokens with at least this share is kept.
        ordered, order = here.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= setting.get("top_p", 1.0)] = 0
        here = torch.zeros_like(here).scatter(-1, order, ordered)
        whole = whole[..., None] * here / here.sum(-1, keepdim=True)
    return whole


def p_value(outputs: list[list[int]], chances: torch.Tensor) -> float:
    """Probability of counts at least as far off, if `chances` are right.

    0 if there is an output of probability 0.
    """
    counts = torch.zeros_like(chances)
    counts.index_put_(
        tuple(torch.tensor(outputs).T), torch.ones((), dtype=chances.dtype), True
    )
    if counts[chances == 0].any():
        return 0.0
    cells = torch.stack([chances.flatten() * len(outputs), counts.flatten()], 1)
    is_rare = cells[:, 0] < FEWEST_EXPECTED
    rest, cells = cells[is_rare].sum(0, keepdim=True), cells[~is_rare]
    if rest[0, 0] >= FEWEST_EXPECTED:
        cells = torch.cat([cells, rest])
    assert len(cells) > 1, f"{len(outputs)} outputs are too few: draw more"
    expected, found = cells.T
    half = ((found - expected) ** 2 / expected).sum() / 2
    return float(torch.special.gammaincc(half.new_tensor((len(cells) - 1) / 2), half))


def requests(setting: dict[str, Any], count: int) -> Iterator[Request]:
    """`count` requests of a setting; its grammar becomes a regular expression."""
    sampling = {"detokenize": False} | setting
    if grammar := sampling.pop("grammar", None):
        places = ("".join(WORDS[token] for token in place) for place in grammar)
        regex = "".join(f"[{place}]" for place in places)
        sampling["structured_outputs"] = StructuredOutputsParams(regex=regex)
    for number in range(count):
        seed = {"seed": number} if "seed" in setting else {}
        yield Request(PROMPT, LENGTH, **sampling | seed)


@pytest.fixture(scope="module")
def count(on_cpu: bool) -> int:
    return int(os.environ.get("VLLM_TEST_SAMPLES", 200 if on_cpu else 20000))


@pytest.fixture(scope="module")
def draw(vllm_runner, folders, count: int):
    """What an engine with a drafter answers, by setting."""

    def drawn(mode: str, settings: dict[str, Any], **spec: Any) -> dict[str, Served]:
        spec |= {"model": str(folders[mode]), "num_speculative_tokens": NUM_DRAFTS}
        spec["method"] = "eagle3" if "eagle" in mode else "draft_model"
        if mode == "draft-small":
            spec["use_heterogeneous_vocab"] = True
        most = min(count, 256)
        # Only steps without prompts are trimmed: there are some in each wave.
        wave = most if "enable_adaptive_verification" in spec else count
        with vllm_runner(
            folders["target"],
            speculative_config=spec,
            max_model_len=32,
            max_num_seqs=most,
            seed=0,
            setup=[make_up_times],
        ) as llm:
            return {
                name: together(map(llm.generate, batched(requests(one, count), wave)))
                for name, one in settings.items()
            }

    return drawn


def together(waves: Iterable[Served]) -> Served:
    waves, names = list(waves), ("num_drafts", "num_draft_tokens")
    names += ("num_accepted_tokens",)
    outputs = [output for wave in waves for output in wave.outputs]
    counters = {name: [sum(wave.count(name) for wave in waves)] for name in names}
    return Served(outputs, counters)


def batched(requests: Iterator[Request], size: int) -> Iterator[list[Request]]:
    while found := list(islice(requests, size)):
        yield found


CASES = ["-".join(case) for case in product(MODES, METHODS)]


@pytest.mark.parametrize("case", only_fast(CASES, "draft-small-probabilistic"))
def test_output_has_target_distribution(draw, logits, on_cpu: bool, case: str):
    """If the first draft that a grammar invalidates were dropped, p would be 1e-5."""
    mode, _, method = case.rpartition("-")
    settings = SETTINGS
    is_adaptive = method.startswith("adaptive")
    if on_cpu:  # the setting that detects most errors with few outputs
        only = "T1.0" if is_adaptive else "T1.0 grammar"
        settings = {only: SETTINGS[only]}
    for name, found in draw(mode, settings, **METHODS[method]).items():
        p = p_value(found.tokens, chances(SETTINGS[name], logits))
        assert p > SIGNIFICANCE, name
        if "grammar" in name:
            continue
        drafts, accepted = map(found.count, ("num_drafts", "num_accepted_tokens"))
        if SETTINGS[name]["temperature"] <= WARMEST:
            least = 1.0 if is_adaptive else LEAST_ACCEPTANCE_LENGTH
            if method == "block" and "seed" in SETTINGS[name]:
                least = LEAST_WITHOUT_SHARED_NOISE
            assert 1 + accepted / drafts > least, name
        if is_adaptive:
            assert found.count("num_draft_tokens") < 0.9 * NUM_DRAFTS * drafts, name


@pytest.mark.parametrize("mode", only_fast(("draft", "pard", "eagle3"), "pard"))
def test_wrong_acceptance_rule_is_detected(draw, logits, mode: str):
    name = "T1.0 grammar"
    found = draw(mode, {name: SETTINGS[name]}, **WRONG_RULE)[name]
    assert p_value(found.tokens, chances(SETTINGS[name], logits)) < SIGNIFICANCE


# Models. The target's next token depends mostly on the last one, and somewhat on all
# before it. Drafters only know the former, so drafts are often right, and often wrong.


def write_models(folder: Path) -> dict[str, Path]:
    """The target and a drafter of each mode, by name."""
    torch.manual_seed(0)
    embed, lm_head = normal(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN, gain=1.5)
    target = {EMBED: embed, LM_HEAD: lm_head} | layer_weights()
    pard = LLAMA | {"pard_token": MASK}
    mask = {"mask_hidden": normal(1, 3 * HIDDEN)}
    checkpoints = {
        "target": (LLAMA, target),
        "draft": (LLAMA, noisy(target)),
        "pard": (pard, noisy(target)),
        "pard2": (pard | PARD2, noisy(target)),
        "eagle3": (LLAMA | HEAD, head_weights(target)),
        "peagle": (LLAMA | HEAD | {"ptd_token_id": MASK}, head_weights(target) | mask),
    }
    checkpoints["eagle3-small"] = reduced(*checkpoints["eagle3"])
    checkpoints["draft-small"] = with_small_words(*checkpoints["draft"])
    folders = {
        name: write_checkpoint(folder / name, *made)
        for name, made in checkpoints.items()
    }
    for name, words in (("target", WORDS), ("draft-small", SMALL_WORDS)):
        numbered = {word: token for token, word in enumerate(words)}
        save_words(numbered, WORDS[0], folders[name])
    projection = matrix(HIDDEN, 2 * HIDDEN, gain=NOISE / PARD2_SCALE)
    torch.save({"target_proj.weight": projection}, folders["pard2"] / "warp_model.bin")
    return folders


def reduced(config: dict[str, Any], weights: Tensors) -> Any:
    """A head that drafts only `KNOWN_TOKENS`; d2t has the offsets of their ids."""
    known = torch.tensor(KNOWN_TOKENS)
    rows = {"lm_head.weight": weights["lm_head.weight"][known].clone()}
    offsets = {"d2t": known - torch.arange(len(known))}
    return config | {"draft_vocab_size": len(known)}, weights | rows | offsets


def with_small_words(config: dict[str, Any], weights: Tensors) -> Any:
    """A draft model of `SMALL_WORDS`; words that the target lacks copy known ones."""
    alike = {"x": "c", "y": "d"}
    rows = [WORDS.index(alike.get(word, word)) for word in SMALL_WORDS]
    tables = {name: weights[name][rows].clone() for name in (EMBED, LM_HEAD)}
    ids = {"vocab_size": len(rows), "eos_token_id": SMALL_WORDS.index(WORDS[0])}
    return config | ids, weights | tables


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape) * std


def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    return normal(rows, columns, std=gain * columns**-0.5)


def layer_weights(prefix: str = "model.") -> Tensors:
    """Weights of the layers, and of norms, which are ones."""
    weights = {}
    for name, shape in shapes_of(LLAMA).items():
        gain = LAYERS_SHARE if "o_proj" in name or "down_proj" in name else 1.0
        if name.startswith(prefix) and name != EMBED:
            weights[name] = (
                matrix(*shape, gain) if len(shape) > 1 else torch.ones(shape)
            )
    return weights


def head_weights(target: Tensors) -> Tensors:
    """An EAGLE-3 head that predicts the target's next token from the last one alone.

    Attention only reads the embedding, which is concatenated with the hidden state, and
    by it attends to the slot's own token. The hidden state adds noise.
    """
    embedding = torch.eye(HIDDEN, 2 * HIDDEN)
    layer = layer_weights(first := "model.layers.0.")
    weights = {n.replace(first, "midlayer."): w for n, w in layer.items()} | {
        "midlayer.self_attn.q_proj.weight": 2 * embedding,
        "midlayer.self_attn.k_proj.weight": embedding,
        "midlayer.self_attn.v_proj.weight": embedding,
        "midlayer.self_attn.o_proj.weight": torch.eye(HIDDEN),
        "midlayer.hidden_norm.weight": torch.full((HIDDEN,), LAYERS_SHARE),
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": target["lm_head.weight"],
    }
    return {name: tensor.clone() for name, tensor in weights.items()}


def noisy(weights: Tensors) -> Tensors:
    return {
        name: tensor + normal(*tensor.shape, std=NOISE * float(tensor.std()))
        if tensor.dim() == 2
        else tensor.clone()
        for name, tensor in weights.items()
    }
