# SPDX-License-Identifier: Apache-2.0
"""Small repositories with pipelines."""

from pathlib import Path
from textwrap import dedent

from tools.ci.steps import Pipelines, load

AREA = ".buildkite/test_areas/area.yaml"
CONFIG = """\
job_dirs: [.buildkite/test_areas]
run_all_patterns: [^base]
run_all_exclude_patterns: ['\\.md$']
devices:
  cpu: {queue: small, num_devices: [1], setup: [make env]}
  h200: {queue: big, num_devices: [1, 2], setup: []}
retry:
  automatic:
    - {exit_status: -1, limit: 2}
"""
STEPS = """\
group: Area
steps:
  - label: One
    key: one
    device: cpu
    timeout_in_minutes: 5
    source_file_dependencies: [src/]
    commands:
      - pytest tests/one
  - label: Two %N
    key: two
    device: cpu
    parallelism: 2
    timeout_in_minutes: 5
    source_file_dependencies: [src/b.py, other/, "!other/not/"]
    commands:
      - python -m tools.ci shard tests/two
  - label: GPU
    key: gpu
    device: h200
    num_devices: 2
    optional: true
    timeout_in_minutes: 5
    depends_on: [one]
    source_file_dependencies: [src/]
    commands:
      - pytest -v tests/one
"""
FIRST = """\
steps:
  - label: Generate
    key: generate
    agents: {queue: small}
    timeout_in_minutes: 5
    commands:
      - .buildkite/upload.sh
"""
FILES = ("src/a.py", "src/b.py", "other/a.py", "other/not/a.py")
TESTS = ("one/test_a.py", "two/test_a.py", "two/test_b.py", "two/sub/test_c.py")


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def repository(root: Path, area: str = STEPS, config: str = CONFIG) -> Path:
    write(root, ".buildkite/ci_config.yaml", config)
    write(root, ".buildkite/pipeline.yaml", FIRST)
    write(root, ".buildkite/upload.sh", "").chmod(0o755)
    write(root, AREA, area)
    for name in FILES:
        write(root, name, "")
    for name in TESTS:
        write(root, f"tests/{name}", "def test():\n    pass\n")
    return root


def one_step(**changes: str) -> str:
    """An area with one step, some lines of it changed, added or ("") left out."""
    lines = {
        "label": "One",
        "key": "one",
        "device": "cpu",
        "timeout_in_minutes": "5",
        "source_file_dependencies": "[src/]",
        "commands": "[pytest tests]",
    } | changes
    text = "\n    ".join(f"{key}: {value}" for key, value in lines.items() if value)
    return f"group: Area\nsteps:\n  - # a step\n    {text}\n"


def pipelines(root: Path, area: str = STEPS, config: str = CONFIG) -> Pipelines:
    return load(repository(root, dedent(area), config))
