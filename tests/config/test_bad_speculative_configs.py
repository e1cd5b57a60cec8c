# SPDX-License-Identifier: Apache-2.0
"""What cannot draft is refused while the engine is configured, by one clear error."""

import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.engine.arg_utils import EngineArgs

from .bad_checkpoints import CONFIGS, FILES, exchange_tokens
from .bad_row import (
    GONE,
    WEIGHTS,
    Bad,
    Break,
    config,
    cut,
    speculative_config,
    tensors,
)
from .bad_settings import SETTINGS
from .specs import cached

ROWS = [*SETTINGS, *CONFIGS, *FILES]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
# Errors as the page lists them: the first cell of each row of its tables. Those of
# loading come last; `tests/model_executor` and `tests/v1/worker` provoke them.
CONFIGURED = DOCS.read_text().partition("## While the drafter loads")[0]
LISTED = re.findall(r"^\| `(.*?)` \| .+ \| .+ \|$", CONFIGURED, re.MULTILINE)


@pytest.fixture(autouse=True)
def no_hang():
    """A row that takes a minute fails."""

    def stop(*_):
        raise TimeoutError("the configuration hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def configure(models, tmp_path_factory, monkeypatch):
    """Configures an engine for a row, as `vllm serve` does; loads nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Not a folder named after the test: the base reads methods off paths.
    folder = tmp_path_factory.mktemp("checkpoint") / "drafter"

    def run(row: Bad):
        shutil.copytree(models / row.drafter, folder)
        for apply in row.breaks:
            apply(folder)
        for name, value in row.env.items():
            monkeypatch.setenv(name, value)
        arguments = {"dtype": "float32", "enforce_eager": True} | row.engine
        return EngineArgs(
            model=str(models / "target"),
            speculative_config=speculative_config(row, folder),
            **arguments,
        ).create_engine_config()

    return run


def entry(says: str) -> str:
    """The one error of the page with these words."""
    (found,) = [error for error in LISTED if says in error]
    return found


def is_one_error(error: BaseException) -> bool:
    hides_context = error.__suppress_context__ or error.__context__ is None
    return error.__cause__ is None and hides_context


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_is_refused_as_documented(configure, row: Bad):
    with pytest.raises(ValueError) as caught:
        configure(row)
    said = re.sub(r"\s+", " ", str(caught.value))
    pattern = ".*?".join(map(re.escape, entry(row.says).split("…")))
    assert re.search(pattern, said), said
    assert is_one_error(caught.value)


def test_each_documented_error_has_a_row():
    # A CPU does not balance experts: `test_draft_length.py` has that one.
    elsewhere = {entry("enable_elastic_ep")}
    assert {entry(row.says) for row in ROWS} | elsewhere == set(LISTED)


def test_the_hubs_cache_is_checked_too(models, tmp_path, monkeypatch):
    shutil.copytree(models / "peagle", folder := tmp_path / "drafter")
    tensors({"mask_hidden": GONE})(folder)
    spec = {"model": cached(folder, "someone/head", monkeypatch)}
    arguments = EngineArgs(model=str(models / "target"), speculative_config=spec)
    with pytest.raises(ValueError, match="someone/head has no tensor mask_hidden"):
        arguments.create_engine_config()


def renamed(change) -> Break:
    """Gives the tensors other names."""

    def apply(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        save_file(
            {change(name): weight for name, weight in weights.items()}, folder / WEIGHTS
        )

    return apply


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def fused(folder: Path) -> None:
    """Projections of one input in one tensor, as vLLM itself has them."""
    weights = load_file(folder / WEIGHTS)
    for whole, parts in {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.items():
        for name in [name for name in weights if f"{parts[0]}_proj" in name]:
            names = [name.replace(f"{parts[0]}_proj", f"{part}_proj") for part in parts]
            weights[name.replace(f"{parts[0]}_proj", f"{whole}_proj")] = torch.cat(
                [weights.pop(part) for part in names]
            )
    save_file(weights, folder / WEIGHTS)


def as_nemo(name: str) -> str:
    at_the_top = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
    return name if name in at_the_top else f"model.{name}"


FULL_VOCABULARY = (
    config(draft_vocab_size=2560),
    tensors(
        {"lm_head.weight": (2560, 256), "d2t": torch.zeros(2560, dtype=torch.int32)}
    ),
)
GOOD = [
    *(Bad(name, "", name) for name in ("draft", "pard", "pard2", "eagle3", "peagle")),
    Bad("one token per pass", "", "peagle", spec={"parallel_drafting": False}),
    Bad("blocks of masks", "", "peagle", spec={"parallel_drafting_width": 2}),
    Bad("keys with dashes", "", spec={"draft-sample-method": "probabilistic"}),
    Bad("EAGLE head as draft model", "", "eagle3", spec={"method": "draft_model"}),
    Bad("EAGLE-3 head as EAGLE head", "", "eagle3", spec={"method": "eagle"}),
    Bad("P-EAGLE as EAGLE head", "", "peagle", spec={"method": "eagle"}),
    Bad("PARD as EAGLE-3 head", "", "pard", spec={"method": "eagle3"}),
    Bad(
        "vocabulary of a head larger than the target's",
        "",
        "eagle3",
        breaks=(config(transformer_layer_config__vocab_size=8000),),
    ),
    Bad("d2t of floats", "", "eagle3", (tensors({"d2t": (1536,)}),)),
    Bad(
        "d2t names a token twice",
        "",
        "eagle3",
        (tensors({"d2t": torch.tensor([1] + [0] * 1535)}),),
    ),
    Bad("several tensors in one", "", "draft", (fused,)),
    Bad(
        "mask_hidden of another shape",
        "",
        "peagle",
        (tensors({"mask_hidden": (3, 256)}),),
    ),
    Bad(
        "broken weights that nobody reads",
        "",
        breaks=(cut(WEIGHTS, 100),),
        engine={"load_format": "dummy"},
    ),
    Bad(
        "a draft model whole, the target split",
        "",
        "draft",
        spec={"draft_tensor_parallel_size": 1},
        engine={"tensor_parallel_size": 2},
    ),
    Bad("another vocabulary, by PARD", "", spec={"use_heterogeneous_vocab": True}),
    Bad("a tree", "", "peagle", spec={"draft_tree": 15}),
    Bad(
        "a depth that nobody asks for",
        "",
        breaks=(config(num_depths=0, speculators_config=[1]),),
    ),
    Bad(
        "a mask token that nobody draws",
        "",
        spec={"parallel_drafting": False},
        breaks=(config(pard_token="<mask>"),),
    ),
    Bad(
        "K is left to the checkpoint",
        "",
        "peagle",
        spec={"num_speculative_tokens": GONE},
    ),
    Bad(
        "a schedule",
        "",
        spec={"num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 0]]},
    ),
    Bad("LoRA for the target", "", engine={"enable_lora": True}),
    Bad(
        "midlayer",
        "",
        "eagle3",
        (renamed(lambda name: name.replace("layers.0.", "midlayer.")),),
    ),
    Bad("prefix model.", "", "peagle", (renamed(as_nemo),)),
    Bad(
        "mask_hidden of two dimensions",
        "",
        "peagle",
        (tensors({"mask_hidden": (1, 768)}),),
    ),
    Bad("d2t of zeros over the whole vocabulary", "", "peagle", FULL_VOCABULARY),
    Bad(
        "whole vocabulary without d2t",
        "",
        "eagle3",
        (*FULL_VOCABULARY, tensors({"d2t": GONE})),
    ),
    Bad("pickled weights", "", breaks=(pickled,)),
    Bad(
        "a tokenizer that nobody reads",
        "",
        "draft",
        breaks=(lambda f: (f / "tokenizer.json").write_text("{"),),
    ),
    Bad("some other tokens", "", "draft", breaks=(exchange_tokens,)),
    Bad(
        "weights are made up",
        "",
        breaks=(lambda f: (f / WEIGHTS).unlink(),),
        engine={"load_format": "dummy"},
    ),
]


@pytest.mark.parametrize("row", GOOD, ids=lambda row: row.id)
def test_what_can_draft_is_not_refused(configure, row: Bad):
    assert configure(row).speculative_config.num_speculative_tokens > 0
