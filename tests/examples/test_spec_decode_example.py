# SPDX-License-Identifier: Apache-2.0
"""The speculative decoding example: whole runs, and every way it can say no."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "offline_inference"
DRAFTERS = ("draft model", "PARD", "PARD-2", "EAGLE-3", "P-EAGLE")
ROWS = ("no speculation", *DRAFTERS)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("spec_decode")


@pytest.fixture
def flags_module(example: ModuleType) -> ModuleType:
    return importlib.import_module("spec_decode_flags")


@pytest.fixture
def report_module(example: ModuleType) -> ModuleType:
    return importlib.import_module("spec_decode_report")


def run_example(
    env: dict[str, str], models: Path, report: Path, *flags: str
) -> tuple[subprocess.CompletedProcess, dict[str, Any]]:
    command = [sys.executable, str(FOLDER / "spec_decode.py"), "--bundle", str(models)]
    command += ["--json", str(report), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert report.is_file(), done.stderr
    return done, json.loads(report.read_text())


# Whole runs


WHOLE = pytest.mark.slow  # an engine for each drafter


@pytest.fixture(scope="module")
def default_run(engine_env, models, tmp_path_factory):
    """All bundled models, as without arguments, only fewer and shorter outputs."""
    report = tmp_path_factory.mktemp("example") / "report.json"
    flags = ("--num-prompts=2", "--output-len=16")
    return run_example(engine_env, models, report, *flags)


@pytest.fixture
def rows(default_run) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in default_run[1]["rows"]}


@WHOLE
def test_default_run_succeeds(default_run):
    done, report = default_run
    assert done.returncode == 0, done.stderr
    assert tuple(row["name"] for row in report["rows"]) == ROWS


@WHOLE
@pytest.mark.parametrize("name", ROWS)
def test_row_of_the_table(default_run, rows, name, on_cpu):
    lines = default_run[0].stdout.splitlines()
    (line,) = [found for found in lines if found.startswith(f"{name} ")]
    row = rows[name]
    assert row["runner"] in line and row["kernels"] in line
    assert row["runner"] == "V2"
    assert row["kernels"] == ("interpreted" if on_cpu else "compiled")
    assert row["tokens_per_second"] > 0


@WHOLE
@pytest.mark.parametrize("name", ROWS)
def test_every_engine_shows_a_progress_bar(default_run, name):
    bars = default_run[0].stderr.replace("\r", "\n").splitlines()
    assert any(bar.startswith(f"{name}: 100%") for bar in bars)


@WHOLE
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_output(rows, name):
    assert rows[name]["identical"] is True
    assert rows[name]["output_tokens"] == rows["no speculation"]["output_tokens"]


@WHOLE
@pytest.mark.parametrize("name", DRAFTERS)
def test_acceptance_of_bundled_models(rows, name):
    row = rows[name]
    by_position = row["acceptance_by_position"]
    assert len(by_position) == row["num_spec_tokens"]
    assert sorted(by_position, reverse=True) == by_position
    assert row["acceptance_length"] == pytest.approx(1 + sum(by_position))
    assert row["acceptance_length"] > 1


def test_one_method_sampled_from_a_text(engine_env, models, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(99)))
    done, report = run_example(
        engine_env,
        models,
        tmp_path / "report.json",
        *("--method=draft_model", "--parallel-drafting", "--num-spec-tokens=3"),
        *("--dataset-name=text", f"--dataset-path={text}", "--prompt-len=32"),
        *("--temp=0.8", "--top-p=0.9", "--num-prompts=2", "--output-len=8"),
        *("--max-num-seqs=1", "--max-model-len=64", "--no-baseline", "--print-output"),
    )
    assert done.returncode == 0, done.stderr
    (row,) = report["rows"]
    assert row["identical"] is None and "n/a" in done.stdout
    assert len(row["acceptance_by_position"]) == 3
    assert done.stdout.count("Prompt: 'def f") == 2


# Comparison and exit status, with results in the engines' place


def fake_result(token_ids: list[list[int]]) -> dict[str, Any]:
    return {
        **{"runner": "V2", "kernels": "compiled", "speculator": None, "device": "none"},
        **{"seconds": 2.0, "counters": {}, "token_ids": token_ids},
    }


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([], [4], 0),
    ],
)
def test_first_difference(report_module, first, second, where):
    assert report_module.first_difference(first, second) == where


@pytest.mark.parametrize(
    ("drafted", "temp", "status", "identical"),
    [
        ([[1, 2], [3, 4]], "0", 0, True),
        ([[1, 2], [3, 5]], "0", 1, False),
        ([[1, 2], [3]], "0", 1, False),
        ([[1, 2], [3, 5]], "0.7", 0, None),
    ],
)
def test_exit_status(
    example, models, monkeypatch, capsys, tmp_path, drafted, temp, status, identical
):
    plain, speculating = fake_result([[1, 2], [3, 4]]), fake_result(drafted)
    monkeypatch.setattr(
        example,
        "run_engine",
        lambda job: speculating if job["engine"]["speculative_config"] else plain,
    )
    monkeypatch.setattr(example, "tokenized_prompts", lambda args: [[1], [2]])
    report = tmp_path / "report.json"
    flags = ["--bundle", str(models), "--method", "eagle3", "--json", str(report)]
    assert example.main([*flags, "--temp", temp]) == status
    rows = json.loads(report.read_text())["rows"]
    assert [row["identical"] for row in rows] == [None, identical]
    said = "eagle3: prompt 1 differs from token 1 on." in capsys.readouterr().out
    assert said == bool(status)


def test_failing_engine(example, models, monkeypatch, capsys):
    monkeypatch.setattr(example, "ENGINE", Path("no_such_engine.py"))
    monkeypatch.setattr(example, "tokenized_prompts", lambda args: [[1]])
    assert example.main(["--bundle", str(models), "--method", "none"]) == 3
    assert "no speculation: the engine failed" in capsys.readouterr().err


def test_acceptance_from_counters(report_module):
    counters = {
        "num_drafts": [10],
        "num_draft_tokens": [20],
        "num_accepted_tokens": [12],
        "num_accepted_tokens_per_pos": [8, 4],
    }
    found = report_module.acceptance(counters)
    assert found["acceptance_length"] == pytest.approx(2.2)
    assert found["acceptance_by_position"] == pytest.approx([0.8, 0.4])


# Flags that do not fit together: one clear line, before any engine starts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-spec-tokens 0", "give a whole number from 1, not '0'"),
        ("--temp -1", "give a number from 0, not '-1'"),
        ("--top-p 1.5", "to 1, not '1.5'"),
        ("--num-prompts x", "give a whole number from 1, not 'x'"),
        ("--prompt-len 0", "--prompt-len: give a whole number from 1"),
        ("--parallel-drafting", "--parallel-drafting needs --method"),
        ("--model-dir a/b", "--model-dir needs --method"),
        ("--no-baseline", "--no-baseline needs --method"),
        ("--method none --parallel-drafting", "--parallel-drafting needs a drafter"),
        ("--method none --num-spec-tokens 2", "--num-spec-tokens needs a drafter"),
        ("--method none --eagle-dir a/b", "takes no --eagle-dir: leave it out"),
        ("--method pard", "write --method draft_model --parallel-drafting"),
        ("--method P-EAGLE", "write --method eagle3 --parallel-drafting"),
        ("--method eagel", "choose from none, draft_model, eagle, eagle3"),
        ("--method eagle", "--method eagle needs --eagle-dir"),
        ("--method eagle3 --model-dir a/b", "--method eagle3 needs --eagle-dir"),
        ("--method draft_model --eagle-dir a/b", "give --draft-model"),
        ("--method eagle3 --eagle-dir ./none", "There is no checkpoint ./none"),
        ("--method none --model-dir .", "has no config.json"),
        ("--dataset-name custom", "--dataset-name custom needs --dataset-path"),
        ("--dataset-name text --dataset-path none.txt", "there is no file none.txt"),
        ("--dataset-path x.jsonl", "--dataset-path needs --dataset-name"),
        ("--json no/such/folder/x.json", "--json: there is no folder"),
        ("--bundle no/such", "There is no checkpoint no/such/target"),
    ],
)
def test_bad_flags(example, models, monkeypatch, capsys, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(example, "run_engine")
    with pytest.raises(SystemExit) as exit_:
        example.main(["--bundle", str(models), *flags.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


# Prompts


@pytest.fixture
def load(example, flags_module, models):
    """Loads prompts as the example does, from its flags."""

    def prompts(*flags: str) -> list[list[int]]:
        parser = flags_module.make_parser("")
        args = parser.parse_args(["--bundle", str(models), *flags])
        flags_module.checked_plan(args)
        return example.tokenized_prompts(args)

    return prompts


def test_stdlib_prompts_are_the_same_for_a_seed(load):
    first = load("--num-prompts=6", "--seed=1")
    assert [len(ids) for ids in first] == [128] * 6
    assert len({tuple(ids) for ids in first}) == 6
    assert load("--num-prompts=6", "--seed=1") == first
    assert load("--num-prompts=6", "--seed=2") != first


def test_custom_prompts_go_through_the_chat_template(load, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os"}\n\n{"question": "import re"}\n')
    flags = ("--dataset-name=custom", f"--dataset-path={file}")
    plain = load(*flags, "--skip-chat-template")
    assert len(plain) == 2
    assert sum(map(len, load(*flags))) >= sum(map(len, plain))


def test_sharegpt_prompts(load, tmp_path):
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "import os"}, {"from": "gpt", "value": "yes"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    assert len(load("--dataset-name=sharegpt", f"--dataset-path={file}")) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("custom", '{"prompt": ', "is not valid JSON"),
        ("custom", '{"answer": "x"}', "must hold the prompt"),
        ("custom", "\n", "no prompt found"),
        ("text", "too short\n", "no prompt found"),
        ("sharegpt", '{"a": 1}', "is not a ShareGPT file"),
    ],
)
def test_bad_datasets(example, load, tmp_path, name, content, message):
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(example.PromptError, match=message):
        load(f"--dataset-name={name}", f"--dataset-path={file}")


def test_hf_dataset_without_its_package(example, load, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(example.PromptError, match="pip install datasets"):
        load("--dataset-name=hf", "--dataset-path=some/dataset")


def test_prompt_longer_than_the_model_takes(example, load):
    with pytest.raises(example.PromptError, match="Set it to 192 or more"):
        load("--max-model-len=128")
