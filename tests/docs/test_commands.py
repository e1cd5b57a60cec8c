# SPDX-License-Identifier: Apache-2.0
"""Every command in the README and the docs is run here, is run by the test or step that
this file names for it, or is marked as needing what a test machine lacks."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from tools.ci.steps import load
from tools.docs import DOCS, ROOT, names
from tools.docs.pages import NEEDS, Fence, commands, fences, hidden_blocks, pages, spans

BLOCKS = [f for page in pages() for f in fences(page) if f.info == "bash"]
HERE = "tests/docs/test_commands.py::"
SERVER = HERE + "test_serving_session"
EXAMPLE = "tests/examples/test_spec_decode_example.py::test_default_run_succeeds"
WHEELS = "tests/package/test_wheels.py::"
INSTALL = "tests/overlay/test_install.py::test_modules"
COMMAND = re.compile(
    r"^(\$ )?(python3?|pip|pytest|make|vllm|git|curl|cd|export|pre-commit) \S", re.M
)
MAKE = "make test"  # runs it, as a whole or as one of its steps
# What runs a command that stands on a page: a test, or MAKE.
RUN_BY = {
    r"export \w+=.*": SERVER,
    r"vllm serve models/target .*": SERVER,
    r"curl .*": SERVER,
    r"python -m tools\.overlay lock": HERE + "test_lock",
    r"python -m tools\.upstream export .*": (
        "tests/upstream/test_series.py::test_nothing_of_the_overlay_is_left"
    ),
    r"python -m tools\.package inspect .*": WHEELS + "test_in_order",
    r"cd dist && sha256sum .*": WHEELS + "test_hash_is_written",
    r"pre-commit install": HERE + "test_pre_commit_installs",
    r"python -m tools\.overlay check": MAKE,
    r"python -m tools\.ci .*": "tests/ci/test_main.py::test_documented_commands",
    r"make (test|lint|env|test-env)": MAKE,
    r"pytest tests[\w./]*": MAKE,
    r"make docs": "tests/docs/test_docs.py::test_builds_without_a_warning",
    r"make demo": EXAMPLE,
    r"python examples/offline_inference/spec_decode\.py": EXAMPLE,
    r"python3 -m venv venv && \. venv/bin/activate": INSTALL,
    r"\. \.venv/bin/activate": MAKE,
    r"pip install \.": INSTALL,
}
# Steps of the pipeline that run what needs the network or time, with other flags where
# a pattern leaves them open; the group is what the step's commands have, too.
STEPS = {
    r"(python -m tools\.package reproduce --device cpu)": "wheel-cpu",
    r"(python -m tools\.package reproduce --device cuda)": "wheel-cuda",
    r"(make wheel DEVICE=cpu)": "wheel-cpu",
    r"(make rebase-report VERSION=\S+)": "rebase-report",
    r"git clone .*(https://github\.com/vllm-project/vllm)": "upstream-clone",
    r"cd vllm && git (am -3 --keep-non-patch) .*": "upstream-clone",
    r"(python -m tools\.upstream try --output build/upstream).*": "upstream-each",
    r"(python -m benchmarks\.spec_decode\.soak --device cpu) .*": "soak",
}


def runs(command: str) -> list[str]:
    return [by for pattern, by in RUN_BY.items() if re.fullmatch(pattern, command)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_each_command_is_run_or_marked(block: Fence):
    if block.needs:
        assert block.needs in NEEDS
        return
    served = {command for block in session_blocks() for command in commands(block)}
    for command in commands(block):
        assert len(runs(command)) == 1, f"{block.where}: what runs `{command}`?"
        assert command in served or runs(command) != [SERVER]


IN_STEPS = [block for block in BLOCKS if block.needs in ("network", "time")]


@pytest.mark.parametrize("block", IN_STEPS, ids=lambda block: block.where)
def test_a_step_runs_what_a_test_cannot(block: Fence):
    for command in commands(block):
        found = [(re.fullmatch(known, command), key) for known, key in STEPS.items()]
        ((match, key),) = [(match, key) for match, key in found if match]
        assert match[1] in "\n".join(load(ROOT).by_key[key].commands), (
            f"{block.where}: the step {key} does not run `{match[1]}`"
        )


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_is_hidden(page: Path):
    """In an indented block, or in a fence that does not say `bash`."""
    assert list(hidden_blocks(page)) == []
    for fence in fences(page):
        assert fence.info == "bash" or not COMMAND.search(fence.body), fence.where


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Run:\n\n    make test\n", [3]),
        ("- first\n\n  ```bash\n  make test\n  ```\n", [3, 5]),
        ("\tmake\n", [1]),
        ("- a long item\n    goes on\n\n```bash\nmake\n\n    test\n```\n", []),
    ],
)
def test_hidden_blocks_are_found(text: str, lines: list[int], tmp_path: Path):
    (tmp_path / "page.md").write_text(text)
    assert list(hidden_blocks(tmp_path / "page.md")) == lines


def test_what_runs_commands_exists():
    found = {c for block in BLOCKS if not block.needs for c in commands(block)}
    for pattern, by in RUN_BY.items():
        assert by == MAKE or not list(names.problems_of(by)), by
        assert any(re.fullmatch(pattern, command) for command in found), pattern
    marked = {c for block in BLOCKS for c in commands(block)}
    for pattern in STEPS:
        assert any(re.fullmatch(pattern, command) for command in marked), pattern


def dry_run(target: str) -> str:
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_steps_of_make_test():
    """What stands for MAKE is what `make test` does."""
    for step in ("-m venv", "--editable .", "python -m tools.ci test"):
        assert step in dry_run("test")
    lint = ROOT / ".buildkite/test_areas/lint.yaml"
    assert "pre-commit run --all-files" in lint.read_text()
    hooks = ROOT / ".pre-commit-config.yaml"
    assert "python -m tools.overlay check" in hooks.read_text()
    assert "python examples/offline_inference/spec_decode.py" in dry_run("demo")
    assert "python -m mkdocs build --strict" in dry_run("docs")


# Every `python -m` and `make`, in blocks, in code spans and in steps of the pipeline.

ELLIPSIS = "python -m benchmarks.spec_decode."  # what "… engine" leaves out


def programs(page: Path) -> list[str]:
    """Commands on a page that run a module, flags or not."""
    found = [text.replace("\n", " ") for _, text in spans(page.read_text())]
    found += [c for fence in fences(page) for c in commands(fence)]
    found = [re.sub(r"^… (?=[a-z_]+ --)", ELLIPSIS, text) for text in found]
    return [text for text in found if re.match(r"python3? -m [a-z_]+\.", text)]


PROGRAMS = sorted(
    {command for page in pages() for command in programs(page)}
    | {
        # In a step the shell chooses the mode, and it knows where wheels are.
        command.replace('"$${modes[BUILDKITE_PARALLEL_JOB]}"', "draft")
        for step in load(ROOT).steps
        for command in step.commands
        if command.startswith("python -m ") and " -m zipfile" not in command
    }
)


WRONG = {
    "python -m benchmarks.spec_decode.engine --modes luck": "invalid choice",
    "python -m benchmarks.spec_decode.engine --no-such 1": "--no-such",
    "python -m tools.ci draw --all": "invalid choice",
    "python -m tools.dashboard --all": "takes no flags",
    "python -m tools.no_such": "there is no such module",
}


@pytest.fixture(scope="module")
def parsed() -> dict[str, str]:
    """What each program's own parser says of its flags: nothing, or the error."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse_programs.py"))],
        input=json.dumps([*PROGRAMS, *WRONG]),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", PROGRAMS)
def test_programs_know_their_flags(command: str, parsed: dict[str, str]):
    assert parsed[command] == ""


def test_programs_that_are_checked(parsed):
    """In a table, in a block and in a step; a bare name is looked for, no more."""
    with_flags = [c for c in PROGRAMS if " --" in c]
    assert any(c.startswith(f"{ELLIPSIS}engine --profile") for c in with_flags)
    assert any(c.startswith(f"{ELLIPSIS}soak --modes draft") for c in with_flags)
    assert "python -m tests.checkpoints.record" in PROGRAMS
    assert len(with_flags) > 10


@pytest.mark.parametrize("command", WRONG)
def test_wrong_flags_are_found(command: str, parsed: dict[str, str]):
    assert WRONG[command] in parsed[command]


def test_targets_of_make():
    known = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    for page in pages():
        said = [text for _, text in spans(page.read_text())]
        said += [c for fence in fences(page) for c in commands(fence)]
        for text in said:
            if found := re.match(r"make ([\w-]+)( |$)", text):
                assert found[1] in known, f"{page.relative_to(ROOT)}: {text}"


# Flags and keys of every command, those that need a GPU too.


def flags_of(block: Fence) -> list[str]:
    return [c for c in commands(block) if re.match(r"(vllm |--|python examples/)", c)]


WITH_FLAGS = [(b.where, c) for b in BLOCKS for c in flags_of(b)]


@pytest.mark.parametrize("command", [c for _, c in WITH_FLAGS], ids=str)
def test_flags_are_known(command: str, monkeypatch):
    from vllm.config import SpeculativeConfig

    words = shlex.split(command)
    if words[0].startswith("--"):
        words = ["vllm", "serve", "a-model", *words]
    program, rest = "example", words[2:]
    if words[:3] == ["vllm", "bench", "serve"]:
        program, rest = "bench", words[3:]
    elif words[0] == "vllm":
        program, rest = "serve", words[2:]
    args = PARSERS[program](monkeypatch).parse_args(rest)
    spec = getattr(args, "speculative_config", None)
    if spec:
        spec = json.loads(spec) if isinstance(spec, str) else spec
        assert spec.keys() <= {field.name for field in fields(SpeculativeConfig)}


def test_settings_on_the_start_page_exist():
    from vllm.config import SpeculativeConfig

    (table,) = re.findall(
        r"Keys of `--speculative-config`.*?\n\n(\|.+?)\n\n",
        (DOCS / "start.md").read_text(),
        re.DOTALL,
    )
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(keys) == len(table.splitlines()) - 2  # head and rule
    assert set(keys) <= {field.name for field in fields(SpeculativeConfig)}


def serve_parser(monkeypatch):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def bench_parser(monkeypatch):
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def example_parser(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/offline_inference"))
    return importlib.import_module("spec_decode_flags").make_parser("")


PARSERS = {"serve": serve_parser, "bench": bench_parser, "example": example_parser}


def test_flags_on_pages_exist(monkeypatch):
    """Every `--flag` in a code span or block is one of a program that has it."""
    known = {"--help"}
    for make in PARSERS.values():
        known |= make(monkeypatch)._option_string_actions.keys()
    for folder in ("benchmarks", "examples", "tools"):
        for source in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z][\w-]*)"', source.read_text()))
    for page in pages():
        code = [text for _, text in spans(page.read_text())]
        code += [c for fence in fences(page) for c in commands(fence)]
        ours = (c for c in code if not re.match(r"\s*(git|pip|curl|cmake|pytest) ", c))
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join(ours)):
            assert flag in known, f"{page.relative_to(ROOT)}: {flag}"


# Commands that are run as they stand.


def test_lock(tmp_path: Path):
    """It finds the seams that are locked, in a copy of the tree."""
    for folder in ("vllm", "tools/overlay"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "base.toml", tmp_path)
    command = [sys.executable, "-m", "tools.overlay", "lock"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "seams.lock").read_text() == (ROOT / "seams.lock").read_text()


def test_pre_commit_installs(tmp_path: Path):
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pre_commit", "install"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / ".git/hooks/pre-commit").is_file()


def session_blocks() -> list[Fence]:
    """The blocks of the start page that serve without a GPU."""
    found = [f for f in fences(DOCS / "start.md") if f.info == "bash" and not f.needs]
    return [f for f in found if SERVER in map(runs_one, commands(f))]


def runs_one(command: str) -> str:
    return next(iter(runs(command)), "")


def test_serving_session(engine_env, on_cpu: bool, tmp_path: Path):
    """The start page's server and what is asked of it, on a free port."""
    if not on_cpu:
        pytest.skip("the session is for a machine without a GPU")
    server, *asked = session_blocks()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = Path(sys.executable).parent
    env = {**engine_env, "PATH": f"{scripts}:{os.environ['PATH']}"}
    log = tmp_path / "log.txt"
    script = server.body.rstrip() + f" --port {port}\n"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-ec", script],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, port, log)
        said = log.read_text()
        for line in expected_lines():
            assert re.search(line, said), line
        for block in asked:
            body = block.body.replace("localhost:8000", f"localhost:{port}")
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", body],
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
        accepted = re.search(
            r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", done.stdout, re.M
        )
        assert float(accepted[1]) > 0
        assert '"text":' in done.stdout
    finally:
        end(process)


def expected_lines() -> list[str]:
    """What the page says stands in the log, as patterns; `...` is anything."""
    (block,) = [f for f in fences(DOCS / "start.md") if "Unified speculator" in f.body]
    lines = block.body.splitlines()
    return [".*".join(map(re.escape, line.split("..."))) for line in lines]


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=10)
            return
        time.sleep(0.5)
    pytest.fail(f"not healthy:\n{log.read_text()}")


def end(process: subprocess.Popen) -> None:
    """SIGTERM to the server and its children and, where it is not enough, SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
