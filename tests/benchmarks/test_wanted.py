# SPDX-License-Identifier: Apache-2.0
"""What was wanted beside what was reached, and tables of profiles."""

import pytest

from benchmarks.spec_decode import profile_tables
from benchmarks.spec_decode.compare import Comparison
from benchmarks.spec_decode.tables import mode_table
from benchmarks.spec_decode.wanted import Figure, Point, figures
from benchmarks.spec_decode.wanted_tables import wanted_text

RUN = {"device": {"copy_bytes_per_s": 1e12}}


def point(speed: float, step_s: float, draft_s: float | None = None, **more) -> dict:
    repeat = {
        "tokens_per_s": speed,
        "step_s": step_s,
        "draft_s": draft_s,
        "prefill_s": 0.02,
    }
    return {
        "run": "r",
        "acceptance_length": 3.5,
        "repeats": [repeat | more.pop("repeat", {})],
        **more,
    }


def engine(target: float, draft: float) -> dict:
    return {"target_bytes": target * 1e9, "draft_bytes": draft * 1e9}


def results(**measurements) -> dict:
    return {
        "runs": {"r": RUN},
        "engines": {"ours/none/K0": engine(4, 0), "ours/peagle/K7": engine(4, 1)},
        "measurements": measurements,
    }


def of(found: dict, title: str, inputs: dict | None = None) -> Figure:
    return next(f for f in figures(found, inputs or {}) if f.title.startswith(title))


def test_ratios_have_the_floor_of_a_draft_pass_for_a_bound():
    found = results(
        **{
            "ours/peagle/K7/equal/c1": point(620.0, 0.010, 0.003),
            "base-v1/peagle/K7/equal/c1": point(500.0, 0.012),
            "ours/peagle/K7/equal/c8": point(1100.0, 0.010, 0.003),
            "base-v1/peagle/K7/equal/c8": point(1000.0, 0.012),
            "ours/peagle/K7/equal/c2": point(1.0, 0.010),  # nothing was wanted of it
            "base-v1/peagle/K7/equal/c2": point(1000.0, 0.012),
        }
    )
    one, eight = of(found, "P-EAGLE over the base").points
    assert one == Point("K=7, 1 request", 1.2, 1.24, pytest.approx(12 / 8))
    assert eight.where == "K=7, 8 requests" and eight.wanted == 1.15
    assert one.is_met and not eight.is_met
    text = wanted_text(found, {})
    assert "| P-EAGLE over the base | 1.15× or 1.20× | 1 of 2 | 1.10× |" in text
    assert "| P-EAGLE over the base | K=7, 8 requests | 1.15× | 1.10× | 1.50× |" in text


def test_a_figure_is_met_to_the_digits_that_are_shown():
    assert Point("", 1.0, 0.996).is_met
    assert not Point("", 1.0, 0.994).is_met


def test_auto_beside_the_base_no_speculation_and_fixed_lengths():
    def at(speed: float, **more) -> dict:
        return point(1.0, 0.01, repeat={"expected_tokens_per_s": speed, **more})

    found = results(
        **{
            "ours/pard/K3/by-position/c32": at(2000.0),
            "ours/pard/K7/by-position/c32": at(1600.0),
            "ours/pard/K11auto/by-position/c32": at(1900.0, drafted={"3": 1}),
            "ours/none/K0/equal/c32": point(1.0, 0.016, acceptance_length=1.0),
            "base-v1/pard/K7/equal/c32": point(1.0, 0.07),
        }
    )
    base, none, best = (
        of(found, f'"auto" {title}').points[0]
        for title in ("over the base", "not below", "to the best")
    )
    steady = 32 * 3.5 / 0.07
    assert base == Point("pard, 32 requests", 1.4, 1900 / steady, 2000 / steady)
    assert none.reached == pytest.approx(1900 / (32 / 0.016)) and not none.is_met
    assert best.reached == pytest.approx(0.95) and not best.is_met


def test_heads_at_published_lengths():
    found = results(
        **{
            "ours/peagle/K7/mt-bench/c1": point(620.0, 0.010, 0.002),
            "ours/eagle3/K3/mt-bench/c1": point(400.0, 0.012),
        }
    )
    (one,) = of(found, "P-EAGLE over EAGLE-3").points
    assert one.reached == pytest.approx(1.55) and one.is_met
    assert one.bound == pytest.approx(12 / (8 + 1))


def test_share_of_the_floor_and_what_the_target_alone_allows():
    found = results(
        **{
            "ours/none/K0/equal/c1": point(1.0, 0.005),
            "ours/peagle/K7/equal/c1": point(1.0, 0.008, 0.003),
        }
    )
    none, peagle = of(found, "Share of the memory floor").points
    assert none.reached == none.bound == pytest.approx(4 / 5)
    assert peagle.reached == pytest.approx(5 / 8)
    assert peagle.bound == pytest.approx(5 / (1 + 5))


def profile(run: str, busy_s: float, kernels: float) -> dict:
    counts = dict.fromkeys(profile_tables.COUNTS.values(), 2.0)
    counts |= {"device_kernels": kernels, "draft_kernels": 60.0}
    step = {"step_s": 2 * busy_s, "busy_share": 0.5, "run": run}
    return step | counts


PROFILED = results(
    **{
        "ours/peagle/K7/equal/c1": point(1.0, 0.010),
        "ours/peagle/K7/equal/c8": point(1.0, 0.010),
    }
)
PROFILED["profiles"] = {
    "ours/none/K0/equal/c1": profile("r", 0.005, 400.0),
    "ours/peagle/K7/equal/c1": profile("r", 0.009, 467.0),
    "ours/peagle/K7/equal/c8": profile("another", 0.010, 470.0),
}


def test_busy_is_of_a_step_without_a_profiler_of_the_same_run():
    (one,) = of(PROFILED, "GPU busy").points
    assert one.where == "peagle, K=7, 1 request"
    assert one.reached == pytest.approx(0.9) and not one.is_met
    rows = profile_tables.step_table(Comparison(PROFILED)).splitlines()
    assert "| ours/peagle/K7/equal/c1 | 9.00 | 10.00 | 90 % | 467.00 |" in rows[3]
    assert "| ours/peagle/K7/equal/c8 | 10.00 | – | – | 470.00 |" in rows[4]


def test_what_drafting_adds():
    rows = profile_tables.diet_table(Comparison(PROFILED)).splitlines()
    assert rows[2].startswith("| P-EAGLE | 7 | 1 | ours | +67.0 | +0.0 |")
    assert rows[3].startswith("| P-EAGLE | 7 | 8 | ours | +70.0 | +0.0 |")


def test_what_recording_graphs_took():
    known = {
        "graph_capture": {
            "all": {"s": 9.5, "reserved_bytes": 2 << 30},
            "drafter": {"s": 3.0, "reserved_bytes": 1 << 30},
        },
        "cudagraph_mode": "FULL",
        "draft_full_graphs": 20,
    }
    none = known | {"graph_capture": {"all": known["graph_capture"]["all"]}}
    found = profile_tables.capture_table(
        {"b": none | {"draft_full_graphs": None}, "a": known, "old": {}}
    )
    assert found.splitlines()[2:] == [
        "| a | FULL | 9.50 | 2.00 | 3.00 | 1.00 | 20 |",
        "| b | FULL | 9.50 | 2.00 | – | – | – |",
    ]


def test_input_preparation():
    found = {
        "ours/pard/first/K7/n32": {"launches": 1, "device_s": 7e-6},
        "base-v1/pard/first/K7/n32": {"launches": 26, "device_s": 56e-6},
        "ours/pard/first/K7/n8": {"launches": 2, "device_s": 7e-6},
        "ours/draft/first/K7/n32": {"launches": 2, "device_s": 7e-6},
    }
    inputs = {"measurements": found}
    (one,) = of({}, "Input preparation over", inputs).points
    assert one == Point("pard, K=7", 5.0, pytest.approx(8.0))
    assert of({}, "Input preparation in one launch", inputs).points[0].is_met
    found["ours/pard/first/K7/n32"]["launches"] = 2
    assert not of({}, "Input preparation in one launch", inputs).points[0].is_met


def test_prefill():
    found = results(
        **{
            "ours/pard/K7/equal/c8": point(1.0, 0.01),
            "base-v1/pard/K7/equal/c8": point(1.0, 0.01, repeat={"prefill_s": 0.018}),
        }
    )
    (one,) = of(found, "Prefill").points
    assert one.reached == pytest.approx(0.9) and not one.is_met


def test_which_runner_of_the_base_and_from_which_run():
    rows = {
        "ours/eagle3/K3/equal/c1": point(10.0, 0.01),
        "base-v2/eagle3/K3/equal/c1": point(9.0, 0.01) | {"run": "other"},
        "ours/eagle3/K3/equal/c2": point(10.0, 0.01),
        "base-v2/eagle3/K3/equal/c2": point(9.0, 0.01),
        "base-v1/eagle3/K3/equal/c2": point(8.0, 0.01),
    }
    found = results(**rows)
    found["runs"]["other"] = RUN
    lines = mode_table(Comparison(found), "eagle3").splitlines()
    assert "| 9 (v2 alone, †) |" in lines[2]
    assert "| 9 (v2) |" in lines[3]
