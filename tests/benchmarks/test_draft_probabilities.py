# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of draft probabilities makes of its counts."""

import pytest

from benchmarks.spec_decode.draft_probabilities.__main__ import (
    TEMPERATURES,
    parse,
    settings,
)
from benchmarks.spec_decode.draft_probabilities.mean import gain_error, mean_length
from benchmarks.spec_decode.draft_probabilities.show import (
    probability_table,
    probability_text,
)
from benchmarks.spec_decode.results import RESULTS, load, save

MEASURED = {
    "pard/greedy/K4/T0.3": mean_length([(10, 20), (10, 30)]),
    "pard/probabilistic/K4/T0.3": mean_length([(10, 22), (10, 30)]),
    "pard/greedy/K4/T1.0": mean_length([(10, 20), (10, 20)]),
}


def test_error_is_that_of_a_mean_over_requests():
    """Of equally many steps each: the deviation over the root of the requests."""
    found = mean_length([(4, 8), (4, 12), (4, 16)])
    assert found["acceptance_length"] == 3.0
    assert found["standard_error"] == pytest.approx(1.0 / 3**0.5, abs=1e-4)
    assert found["requests"] == 3


def test_error_of_a_gain_knows_that_prompts_are_the_same():
    hard, easy = (4, 5), (4, 18)
    assert gain_error([hard, easy], [hard, easy]) == 0
    assert gain_error([hard, easy], [(4, 6), easy]) == pytest.approx(1 / 8)


def test_one_request_has_no_error():
    with pytest.raises(ValueError, match="raise --prompts"):
        mean_length([(4, 8)])


def test_points_of_both_kinds_stand_side_by_side():
    (row,) = probability_table(MEASURED).splitlines()[2:]
    assert row == "| PARD | 0.30 | 2.50 ± 0.50 | 2.60 ± 0.40 | +0.10 ± 0.10 |"


FIVE = {"draft", "pard", "pard2", "eagle3", "peagle"}


@pytest.mark.parametrize(
    "device, modes, sure_from",
    # 32 requests on a CPU are too few to tell P-EAGLE's gain at temperature 1.
    [("cpu", FIVE, 1.3), ("nvidia-h200", FIVE - {"pard2"}, 1.0)],
)
def test_what_was_measured_gains(device: str, modes: set[str], sure_from: float):
    """With probabilities no fewer drafts are accepted than without, but for chance;
    more where outputs are random, by more than chance from some temperature on."""
    found = load(RESULTS / device / "draft_probabilities.json")["measurements"]
    pairs = [
        (key, found[key.replace("/probabilistic/", "/greedy/")], found[key])
        for key in found
        if "/probabilistic/" in key
    ]
    assert {key.partition("/")[0] for key, *_ in pairs} == modes
    assert len(pairs) == len(TEMPERATURES) * len(modes)
    for key, greedy, probable in pairs:
        gain = probable["acceptance_length"] - greedy["acceptance_length"]
        error = gain_error(greedy["counts"], probable["counts"])
        temperature = float(key.rpartition("/T")[2])
        assert gain > -2 * error - 1e-6, key
        assert gain > 0 or temperature < 1, key
        assert gain > 2 * error or temperature < sure_from, key


def test_a_run_does_not_say_where_its_files_were():
    found = settings(parse(["--models", "/some/where", "--output=/else/where"]))
    assert found["prompts"] == "48"
    assert "where" not in str(found)


def test_report_has_a_section_and_a_plot(tmp_path):
    folder = tmp_path / "results" / "cpu"
    assert list(probability_text(folder, tmp_path)) == []
    save(folder / "draft_probabilities.json", {"measurements": MEASURED})
    text = "\n".join(probability_text(folder, tmp_path))
    assert "images/cpu-draft-probabilities.png" in text
    assert (tmp_path / "images" / "cpu-draft-probabilities.png").is_file()
