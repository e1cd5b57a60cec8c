# SPDX-License-Identifier: Apache-2.0
"""The pipeline that Buildkite is given."""

from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from .steps import Pipelines, Step

PASSED_ON = ("timeout_in_minutes", "env", "soft_fail", "parallelism", "artifact_paths")


def pipeline_yaml(pipelines: Pipelines, steps: list[Step], nightly: bool) -> str:
    """Text of the pipeline with these steps.

    Args:
        pipelines: all areas.
        steps: the selected ones, those of an area together.
        nightly: run optional steps too, instead of behind a button.
    """
    groups = [
        group_step(list(members), pipelines, nightly)
        for _, members in groupby(steps, key=lambda step: step.area.name)
    ]
    return yaml.dump({"steps": groups}, Dumper=Plain, sort_keys=False, width=88)


class Plain(yaml.SafeDumper):
    """Writes each part out, where YAML could refer to an earlier one."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def group_step(
    steps: list[Step], pipelines: Pipelines, nightly: bool
) -> dict[str, Any]:
    area = Path(steps[0].area.name).stem
    found = []
    for step in steps:
        command = command_step(step, pipelines)
        if step.optional and not nightly:
            key, name = f"block-{step.key}", step.label.replace(" %N", "")
            found.append({"block": f"Run {name}", "key": key, "depends_on": []})
            command["depends_on"].append(key)
        found.append(command)
    return {"group": steps[0].group, "key": f"group-{area}", "steps": found}


def command_step(step: Step, pipelines: Pipelines) -> dict[str, Any]:
    device = pipelines.config.data["devices"][step.device]
    agents = {"queue": device["queue"]}
    if "num_devices" in step.data:
        agents["num_devices"] = str(step.data["num_devices"])
    return {
        "label": step.label,
        "key": step.key,
        "agents": agents,
        "commands": [*device["setup"], *step.commands],
        # Said even where it is empty: else a step waits for the buttons above it.
        "depends_on": list(step.depends_on),
        **{name: step.data[name] for name in PASSED_ON if name in step.data},
        "retry": step.data.get("retry", pipelines.config.data["retry"]),
    }
