# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboard of drafting: `python -m tools.dashboard`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = (
    Path(__file__).resolve().parents[1]
    / "examples/observability/dashboards/grafana/vllm_drafting.json"
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Variables of the dashboard: label, and what it is called.
VARIABLES = {
    "job": "Job",
    "model_name": "Model",
    "instance": "Instance",
    "engine": "Engine",
    "mode": "Mode",
}
SCRAPED = "vllm:spec_decode_num_steps_total"  # has all these labels
HEIGHT = {"stat": 4, "timeseries": 8}


def rate(metric: str, by: str = "", labels: tuple[str, ...] = tuple(VARIABLES)) -> str:
    """Per second, summed over all series that are chosen, or by some labels."""
    chosen = ", ".join(f'{label}=~"${label}"' for label in labels)
    group = f" by ({by}) " if by else ""
    return f"sum{group}(rate(vllm:{metric}_total{{{chosen}}}[$__rate_interval]))"


def drafting(metric: str, by: str = "") -> str:
    return rate(f"spec_decode_{metric}", by)


def quotient(above: str, below: str) -> str:
    """Nothing, rather than a division by zero, where nothing happens."""
    return f"{above} / ({below} > 0)"


def acceptance_length(by: str = "") -> str:
    accepted = drafting("num_accepted_tokens", by)
    return f"1 + {quotient(accepted, drafting('num_drafts', by))}"


def time_share(by: str = "") -> str:
    draft, target = drafting("draft_seconds", by), drafting("target_seconds", by)
    return quotient(draft, f"({draft} + {target})")


def per_step(part: str, by: str = "mode") -> str:
    seconds = drafting(f"{part}_seconds", by)
    return quotient(seconds, drafting("num_timed_steps", by))


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` maps legends to expressions."""

    kind: str
    width: int  # of 24 columns
    title: str
    description: str
    unit: str
    queries: dict[str, str] = field(hash=False)
    is_stacked: bool = False

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0}
        if self.unit == "short":
            defaults["decimals"] = 2
        if self.is_stacked:
            defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"h": HEIGHT[self.kind], "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend}
                for i, (legend, expr) in enumerate(self.queries.items())
            ],
        }


STATS = (
    (
        "Acceptance length",
        "Tokens that a request gains per verified draft, its own next one included.",
        "short",
        acceptance_length(),
    ),
    (
        "Draft acceptance rate",
        "Accepted tokens of those drafted.",
        "percentunit",
        quotient(drafting("num_accepted_tokens"), drafting("num_draft_tokens")),
    ),
    (
        "Drafted tokens",
        'Per request and step; where the draft length is "auto", what it chose.',
        "short",
        quotient(drafting("num_draft_tokens"), drafting("num_drafts")),
    ),
    (
        "Draft time share",
        "Drafting, of the time of a step on the device. One step in 16 is timed.",
        "percentunit",
        time_share(),
    ),
)
SERIES = (
    Panel(
        "timeseries",
        12,
        "Acceptance length by mode",
        "It pays to draft where this outweighs the time that drafting and verifying "
        "more tokens take.",
        "short",
        {"{{mode}}": acceptance_length("mode")},
    ),
    Panel(
        "timeseries",
        12,
        "Acceptance by draft position, where drafted",
        "Of the tokens that were drafted at a position (0 is the first), those "
        "accepted, and so all before them. Drafts that ended before it do not count.",
        "percentunit",
        {
            "{{mode}} {{position}}": quotient(
                drafting("num_accepted_tokens_per_pos", "mode, position"),
                drafting("num_draft_tokens_per_pos", "mode, position"),
            )
        },
    ),
    Panel(
        "timeseries",
        12,
        "Draft length of steps",
        "How many tokens each request of a step was to draft, as a share of all steps; "
        "0 drafts nothing.",
        "percentunit",
        {
            "{{draft_length}}": f"{drafting('num_steps', 'draft_length')} / on () "
            f"group_left () ({drafting('num_steps')} > 0)"
        },
        is_stacked=True,
    ),
    Panel(
        "timeseries",
        12,
        "Draft time share by mode",
        "Drafting, of the time of a step on the device.",
        "percentunit",
        {"{{mode}}": time_share("mode")},
    ),
    Panel(
        "timeseries",
        12,
        "Time of a step",
        "Mean over the steps that were timed, prompts included.",
        "s",
        {
            "target, {{mode}}": per_step("target"),
            "drafting, {{mode}}": per_step("draft"),
        },
        is_stacked=True,
    ),
    Panel(
        "timeseries",
        12,
        "Tokens",
        "Generated tokens, of them accepted drafts, and drafted tokens.",
        "short",
        {
            "generated": rate("generation_tokens", labels=tuple(VARIABLES)[:-1]),
            "accepted": drafting("num_accepted_tokens"),
            "drafted": drafting("num_draft_tokens"),
        },
    ),
)


def variable(label: str, name: str) -> dict[str, Any]:
    before = list(VARIABLES)[: list(VARIABLES).index(label)]
    chosen = ", ".join(f'{label}=~"${label}"' for label in before)
    return {
        "name": label,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({SCRAPED}{{{chosen}}}, {label})",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def panels() -> list[dict[str, Any]]:
    stats = (
        Panel("stat", 6, title, text, unit, {"": expr})
        for title, text, unit, expr in STATS
    )
    laid_out, x, y = [], 0, 0
    for number, panel in enumerate((*stats, *SERIES), start=1):
        laid_out.append(panel.as_json(number, x, y))
        x += panel.width
        if x == 24:
            x, y = 0, y + HEIGHT[panel.kind]
    return laid_out


def dashboard() -> dict[str, Any]:
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource"}
    return {
        "uid": "vllm-drafting",
        "title": "vLLM / Drafting",
        "description": "Speculative decoding by mode: acceptance, length and time.",
        "tags": ["vllm"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                datasource | {"query": "prometheus"},
                *(variable(*item) for item in VARIABLES.items()),
            ]
        },
        "panels": panels(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n")
