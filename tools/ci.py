# SPDX-License-Identifier: Apache-2.0
"""Generates a build's pipeline from the steps in .buildkite/, which have vLLM's keys.

    python -m tools.ci --since origin/main    steps that a branch's changes affect
    python -m tools.ci --all --nightly        all steps, including optional ones

It prints JSON for `buildkite-agent pipeline upload`.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
OWN = ("label", "key", "device", "commands", "optional", "num_devices")
DEPENDENCIES = "source_file_dependencies"
PASSED_ON = ("timeout_in_minutes", "env", "soft_fail", "parallelism", "artifact_paths")
Step = dict[str, Any]


def load_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".buildkite/ci_config.yaml").read_text())


def load_groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every test area, with its `group` and its `steps`."""
    files = (f for d in config["job_dirs"] for f in sorted((ROOT / d).glob("*.yaml")))
    return [yaml.safe_load(file.read_text()) for file in files]


def concerns(step: Step, path: str) -> bool:
    """Whether a step depends on a file: on its path or folder, or on all files if it
    names none."""
    return path.startswith(tuple(step.get(DEPENDENCIES, [""])))


def needs_all(config: dict[str, Any], groups: list[dict], path: str) -> bool:
    """Whether a file affects all steps: by a pattern, or because no step names it."""
    if any(re.search(p, path) for p in config["run_all_exclude_patterns"]):
        return False
    if any(re.search(p, path) for p in config["run_all_patterns"]):
        return True
    steps = (step for group in groups for step in group["steps"])
    return not any(DEPENDENCIES in step and concerns(step, path) for step in steps)


def changed_since(ref: str) -> list[str]:
    """Files that differ from the merge base with `ref`, including deleted ones."""
    command = ["git", "diff", "--name-only", "--no-renames", "--merge-base", ref]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().splitlines()


def steps_of(step: Step, config: dict[str, Any], nightly: bool) -> list[Step]:
    """A step in Buildkite's format, behind a button if it is optional."""
    device = config["devices"][step["device"]]
    agents = {"queue": device["queue"]}
    if "num_devices" in step:
        agents["num_devices"] = str(step["num_devices"])
    command: Step = {
        "label": step["label"],
        "key": step["key"],
        "agents": agents,
        "commands": [*device["setup"], *step["commands"]],
        "depends_on": [],  # else a step waits for the buttons before it
        "retry": config["retry"],
        **{name: step[name] for name in PASSED_ON if name in step},
    }
    if nightly or not step.get("optional"):
        return [command]
    button = f"block-{step['key']}"
    command["depends_on"] = [button]
    return [
        {"block": f"Run {step['label']}", "key": button, "depends_on": []},
        command,
    ]


def pipeline(changed: list[str] | None, nightly: bool = False) -> dict[str, Any]:
    """The pipeline of a change.

    Args:
        changed: its files, relative to the repository's root; None selects all steps.
        nightly: run optional steps too, without a button before each.
    """
    config = load_config()
    groups = load_groups(config)
    if changed is not None and any(needs_all(config, groups, p) for p in changed):
        changed = None
    made = []
    for group in groups:
        steps = [
            made_step
            for step in group["steps"]
            if changed is None or any(concerns(step, path) for path in changed)
            for made_step in steps_of(step, config, nightly)
        ]
        if steps:
            made.append({"group": group["group"], "steps": steps})
    return {"steps": made}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.ci", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--since", metavar="REF", help="what differs from this branch")
    which.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--nightly", action="store_true", help="optional steps too")
    args = parser.parse_args(argv)
    changed = None if args.all else changed_since(args.since)
    print(json.dumps(pipeline(changed, args.nightly), indent=1))


if __name__ == "__main__":
    main()
