# SPDX-License-Identifier: Apache-2.0
"""Each cell of the table in `docs/targets.md`: a target with a kind of drafter.

Output is the target's own, greedy and sampled, and drafts of a drafter that is right
are accepted; or it is refused, or does less, as the table says.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunEngine
from .engine import EngineError
from .target_models import (
    TARGETS,
    TOKENS,
    save_head,
    save_pard,
    save_pard2,
    save_target,
)

TABLE = Path(__file__).parents[3] / "docs/targets.md"
K, NODES = 4, 12
# Of the table: drafter, and settings. A draft model is the target itself, and draws its
# drafts as the target draws, so that they are right there, too.
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft model": ("", {"draft_sample_method": "probabilistic"}),
    "PARD": ("pard", {}),
    "PARD-2": ("pard2", {}),
    "EAGLE-3": ("eagle3", {}),
    "P-EAGLE": ("peagle", {}),
    "PARD's trees": ("pard", {"draft_tree": NODES}),
    "PARD-2's trees": ("pard2", {"draft_tree": NODES}),
    "P-EAGLE's trees": ("peagle", {"draft_tree": NODES}),
}
ENGINE = {
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": True,
}
# Where vLLM's kernels for a target's layers take no float32, on a CPU and on a GPU.
ON_CPU, ON_GPU = {"Qwen3-Next": "bfloat16"}, {"DeepSeek-V2": "bfloat16"}
SAMPLED = {"temperature": 1.5}
ACCEPTED = 0.95  # of drafts at each position
LENGTHS, NUM_TOKENS = (9, 20, 45, 70), 32
# What is logged, or said by the error, of a cell; of "yes" none of it is.
SAID = {
    "refused": "does not support|layers with a state",
    "as PARD": "drafts without the target's hidden states",
    "chains": "Draft trees are not used",
}
# Each finds what the others do not: a tree that must not be one, and states of layers.
FAST = ("gpt-oss, PARD's trees", "Nemotron-H, P-EAGLE")


def read_table() -> dict[str, str]:
    """What the page says of each target and kind of drafter: "target, drafter"."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, *rows = [row for row in rows if row[0] in ("target", *TARGETS)]
    return {
        f"{row[0]}, {column}": cell
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


CELLS = read_table()


def engine(name: str, on_cpu: bool) -> dict[str, Any]:
    """What a target is served with."""
    dtypes = ON_CPU if on_cpu else ON_GPU
    return ENGINE | {"dtype": dtypes.get(name, "float32")}


def prompt(length: int) -> list[int]:
    """At random, but for the end, from which it is counted on."""
    rng = random.Random(length)
    first = rng.randrange(TOKENS)
    tail = [(first + i) % TOKENS for i in range(8)]
    return [rng.randrange(TOKENS) for _ in range(length - len(tail))] + tail


def counted_on(length: int) -> list[int]:
    """What follows a prompt."""
    first = prompt(length)[-1] + 1
    return [(first + i) % TOKENS for i in range(NUM_TOKENS)]


def scenarios() -> dict[str, list[dict[str, Any]]]:
    asked = [{"prompt": prompt(n), "max_tokens": NUM_TOKENS} for n in LENGTHS]
    drawn = [
        one | {"sampling": SAMPLED | {"seed": seed}} for seed, one in enumerate(asked)
    ]
    return {"greedy": asked, "drawn": drawn}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        "targets": folder,
        "pard": save_pard(folder / "pard"),
        "pard2": save_pard2(folder / "pard2"),
        "eagle3": save_head(folder / "eagle3", is_parallel=False),
        "peagle": save_head(folder / "peagle", is_parallel=True),
    }


@pytest.fixture(scope="module")
def alone(folders, run_engine: RunEngine, on_cpu: bool):
    """A target's folder, and what it says without drafts.

    It counts, and what it draws is not that: it depends on all its layers.
    """
    made: dict[str, Any] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            folder = save_target(name, folders["targets"] / name)
            result = run_engine(scenarios(), model=folder, **engine(name, on_cpu))
            said = {each: one["tokens"] for each, one in result["scenarios"].items()}
            assert said["greedy"] == [counted_on(length) for length in LENGTHS]
            assert said["drawn"] != said["greedy"]
            made[name] = folder, said
        return made[name]

    return get


def acceptance(found: dict[str, Any]) -> list[float]:
    """Of the drafts at each position, the share that was accepted."""
    counted = found["counters"]
    accepted = counted["num_accepted_tokens_per_pos"][:K]
    return [count / counted["num_drafts"][0] for count in accepted]


@pytest.mark.parametrize(
    "cell",
    [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CELLS],
)
def test_cell(cell: str, alone, folders, run_engine: RunEngine, on_cpu: bool):
    name, column = cell.split(", ")
    (drafter, settings), expected = COLUMNS[column], CELLS[cell]
    folder, said = alone(name)
    spec = {"model": str(folders.get(drafter, folder)), "num_speculative_tokens": K}
    spec |= settings if drafter else settings | {"method": "draft_model"}

    def run() -> dict[str, Any]:
        given = engine(name, on_cpu)
        return run_engine(scenarios(), model=folder, speculative_config=spec, **given)

    if expected == "refused":
        with pytest.raises(
            EngineError, match=rf"ValidationError[\s\S]*({SAID[expected]})"
        ):
            run()
        return
    result = run()
    logged = {what for what, words in SAID.items() if words in result["log"]}
    assert logged == {what for what in expected.split(", ") if what != "yes"}
    found = result["scenarios"]
    assert found["greedy"]["tokens"] == said["greedy"]
    if on_cpu or name not in ON_GPU:  # else rounding depends on the batch
        assert found["drawn"]["tokens"] == said["drawn"]
    if "as PARD" not in logged:
        assert min(acceptance(found["greedy"])) >= ACCEPTED
    if not drafter:
        assert min(acceptance(found["drawn"])) >= ACCEPTED


def test_table_is_complete():
    wanted = {f"{name}, {column}" for name in TARGETS for column in COLUMNS}
    assert CELLS.keys() == wanted
