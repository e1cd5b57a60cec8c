# SPDX-License-Identifier: Apache-2.0
"""The exported series applies to the base's files, and its tests pass there."""

import ast
import json
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.docs.pages import hidden_blocks
from tools.overlay.base import ROOT, find_wheel, pinned_base, target_device
from tools.upstream import series as series_module
from tools.upstream.__main__ import main
from tools.upstream.measured import MARK
from tools.upstream.results import load as load_results
from tools.upstream.results import sentence, whole_sentence
from tools.upstream.series import SeriesError, load, reworded, rewritten
from tools.upstream.tree import git
from tools.upstream.trial import apply_series, failing_imports, run_tests, touched

UNIFIED = "tests/v1/spec_decode/unified"
# Of what the series brings: kernels, layout, settings, weights.
FAST = [
    f"{UNIFIED}/kernels",
    f"{UNIFIED}/config/test_drafter.py",
    f"{UNIFIED}/config/test_sampling_params.py",
    f"{UNIFIED}/config/test_speculative_keys.py",
    f"{UNIFIED}/config/test_speculators.py",
    f"{UNIFIED}/model_executor/model_loader/test_draft_weights.py",
    f"{UNIFIED}/worker/gpu/spec_decode/test_eagle3_layers.py",
    f"{UNIFIED}/worker/gpu/spec_decode/test_draft_graphs.py",
    f"{UNIFIED}/worker/gpu/spec_decode/test_unified_inputs.py",
    f"{UNIFIED}/worker/gpu/spec_decode/test_unified_layout.py",
]
DRAFTS, NUM_TOKENS = 3, 12
# Words of this repository, and its modules.
OURS = re.compile(r"\b(the base|seams?|overlay|tools\.\w+)\b(?!-)", re.IGNORECASE)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The base's files with the series on top, importable."""
    folder = tmp_path_factory.mktemp("series")
    assert main(["export", "--output", str(folder / "patches")]) == 0
    patches = sorted((folder / "patches").glob("*.patch"))
    wheel = find_wheel(pinned_base(target_device()))
    apply_series(patches, wheel, folder / "tree")
    return folder / "tree"


def commits(tree: Path) -> list[str]:
    return git(tree, "rev-list", "--reverse", "HEAD").split()[1:]


def test_every_patch_stands_on_those_before(tree):
    """What its files import of vLLM or of the tests is there once it is applied."""
    missing = []
    for commit in commits(tree):
        known = git(tree, "ls-tree", "-r", "--name-only", commit).splitlines()
        modules = {path.removesuffix(".py").removesuffix("/__init__") for path in known}
        modules |= {path.rpartition("/")[0] for path in known}
        for path in touched(tree, commit):
            if path.endswith(".py"):
                text = git(tree, "show", f"{commit}:{path}")
                missing += [
                    f"{commit}:{path}: {name}"
                    for name in imported_modules(path, text)
                    if name.replace(".", "/") not in modules
                ]
    assert missing == []


def imported_modules(path: str, text: str):
    package = path.rpartition("/")[0].replace("/", ".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            name = resolve_name("." * node.level + (node.module or ""), package)
            # Of the base some modules are compiled, or generated when it is built.
            if name.startswith(("vllm.config.", "tests.")) or "spec_decode" in name:
                yield name


def test_nothing_of_the_overlay_is_left(tree):
    files = {path for commit in commits(tree) for path in touched(tree, commit)}
    for path in files:
        text = (tree / path).read_text()
        assert "vllm._upstream" not in text and "stand_on(" not in text, path
        assert not re.search(r"^(from|import) tools\b", text, re.MULTILINE), path


def test_words_are_upstreams(tree):
    found = [
        line
        for commit in commits(tree)
        for line in git(tree, "show", commit).splitlines()
        if line.startswith("+") and OURS.search(line)
    ]
    assert found == []


def test_modules_import(tree):
    files = {path for commit in commits(tree) for path in touched(tree, commit)}
    assert failing_imports(tree, sorted(files)) == {}


def test_tests_pass_on_the_patched_tree(tree, monkeypatch):
    monkeypatch.setenv("VLLM_TEST_EXAMPLES", "20")
    status, said = run_tests(tree, FAST, "-n", "0")
    assert status == 0, said[-6000:]
    assert re.search(r"\d\d+ passed", said)


def test_an_engine_drafts_on_the_patched_tree(tree, tmp_path, models, engine_env):
    """Greedy output of a drafting engine is what transformers says of the target."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    prompt = tokenizer("def add(a, b):\n    return", add_special_tokens=False).input_ids
    job = {
        "engine": {
            "model": str(models / "target"),
            "speculative_config": {
                "model": str(models / "pard"),
                "num_speculative_tokens": DRAFTS,
            },
            "dtype": "float32",
            "enforce_eager": True,
            "disable_log_stats": False,
            "gpu_memory_utilization": 0.1,
            "max_model_len": 64,
            "max_num_seqs": 2,
        },
        "scenarios": {"one": [{"prompt": prompt, "max_tokens": NUM_TOKENS}]},
    } | dict.fromkeys(("async_scheduling", "idle_every"), 0)
    job |= dict.fromkeys(("record_drafts", "record_graphs"), False)
    found = run_engine_job(tree, tmp_path, job, engine_env)
    assert found["drafter"] == "DraftModelDrafter"
    assert found["scenarios"]["one"]["counters"]["num_drafts"][0] > 0
    expected = greedy(models / "target", prompt)
    assert len(set(expected)) > 3
    assert found["scenarios"]["one"]["tokens"] == [expected]


def run_engine_job(tree: Path, folder: Path, job: dict, engine_env: dict) -> dict:
    (folder / "job.json").write_text(json.dumps(job))
    files = [str(folder / name) for name in ("job.json", "result.json")]
    environment = engine_env | {
        "PYTHONPATH": str(tree),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, str(tree / UNIFIED / "e2e" / "engine_job.py"), *files],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "result.json").read_text())


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            following = model(text).logits[:, -1:].argmax(-1)
            text = torch.cat([text, following], dim=1)
    return text[0, len(prompt) :].tolist()


def test_pull_request_texts():
    """Each has its parts, and the files that it refers to are there."""
    series = load()
    for patch in series.patches:
        text = (ROOT / patch.text).read_text()
        assert list(hidden_blocks(ROOT / patch.text)) == []
        assert "Passes" not in text  # that is recorded, and put in when exported
        assert text.startswith(f"# {patch.title}\n")
        assert re.findall(r"(?m)^## (.*)", text) == [
            "Purpose",
            "Test plan",
            "Test result",
        ]
        for path in re.findall(r"\b(?:benchmarks|docs)/[\w./-]+\w", text):
            assert (ROOT / path).exists(), path
        placed = {series.place(file) for file in series_module.our_files()}
        for path in re.findall(rf"{UNIFIED}[\w./]*\w", text):
            assert any(f"{file}/".startswith(f"{path}/") for file in placed), path


def test_exported_texts_say_what_was_recorded(tree):
    texts = sorted((tree.parent / "patches").glob("*.md"))
    for file, patch in zip(texts, load().patches, strict=True):
        told = sentence(patch.title, load_results())
        assert " modules import; tests: " in told, (
            f"{patch.title} was not tried: run `python -m tools.upstream try --each "
            "--output DIR --record`"
        )
        text = file.read_text()
        whole = whole_sentence(load_results())
        assert f"## Test result\n\n{told}\n\n{whole}\n" in text
        assert not MARK.search(text)


def test_documented_order():
    text = (ROOT / "docs" / "upstreaming.md").read_text()
    order = text.partition("\n## The order\n")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| (\[.+?) \|", order) == [p.title for p in load().patches]


@pytest.fixture
def repository(tmp_path) -> Path:
    for name in ("vllm/config/vllm.py", "vllm/new.py", "tests/test_new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def load_text(folder: Path, files: list[str], downstream: str = "") -> dict:
    text = f"""
        downstream = {{ {downstream} }}
        places = {{ "tests" = "tests/place" }}
        patch = [{{ title = "t", text = "t.md", files = {files} }}]
    """
    (folder / "series.toml").write_text(text)
    return load(folder / "series.toml").homes(folder)


def test_files_have_one_place_each(repository):
    found = load_text(
        repository, ["vllm/*", "tests/*"], downstream='"vllm/new.py" = "why"'
    )
    assert found == {
        "vllm/config/vllm.py": 0,
        "vllm/new.py": "downstream",
        "tests/test_new.py": 0,
    }


@pytest.mark.parametrize(
    "files, error",
    [
        (["vllm/*"], "tests/test_new.py is in 0 places"),
        (["vllm/*", "vllm/n*", "tests/*"], "vllm/new.py is in 2 places"),
        (["vllm/*", "tests/*", "gone/*"], "gone/[*] matches no file"),
    ],
)
def test_files_without_one_place_are_told(repository, files, error):
    with pytest.raises(SeriesError, match=error):
        load_text(repository, files)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("# As the base sizes rows.", "# As vLLM sizes rows."),
        ("The base's hash", "vLLM's hash"),
        ("the base-v1, the baseline", "the base-v1, the baseline"),
    ],
)
def test_reworded(text: str, expected: str):
    assert reworded(text) == expected


def test_moved_files_find_each_other():
    moves = {"tests/a/one.py": "tests/b/c/one.py", "tests/a/test_x.py": "tests/b/x.py"}
    text = (
        "from tests.a.one import f\n# see tests/a/one.py\n"
        'DOC = Path(__file__).resolve().parents[2] / "docs"\n'
    )
    assert rewritten(text, "tests/a/one.py", moves) == (
        "from tests.b.c.one import f\n# see tests/b/c/one.py\n"
        'DOC = Path(__file__).resolve().parents[3] / "docs"\n'
    )
    assert "parents[2]" in rewritten(text, "vllm/two.py", moves)
