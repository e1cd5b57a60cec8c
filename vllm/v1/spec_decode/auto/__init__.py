# SPDX-License-Identifier: Apache-2.0
"""Chooses how much is drafted and verified while serving ("auto").

A plan is a number of drafts per request: none, a chain of some length, or a tree of
some number of nodes, which is above the longest chain. The engine follows the plan that
promises the most tokens per second:

    acceptance.py   what a plan yields: acceptance length, by what was accepted lately
    times.py        what a step of it takes: measured at start, corrected while serving
    verify.py       what verifying only the likeliest drafts of a large batch adds
    chooser.py      chooses by these three, and tries other plans now and then
    measure.py      times the steps of all plans at start, on the workers
    kept.py         keeps these times for later starts

Apart from these two, the package is pure Python and NumPy, and knows neither the
scheduler nor its types: `vllm/v1/core/sched/draft_policy.py` translates.
"""
