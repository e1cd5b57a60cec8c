# SPDX-License-Identifier: Apache-2.0
"""What the P-EAGLE post of March 2026 reports: GPT-OSS-20B on one B200, vLLM 0.16.

The acceptance lengths count the target's own token. The ratios are throughputs of
P-EAGLE over EAGLE-3, each at its best K.
"""

# Data set: mode: K: mean tokens per step.
ACCEPTANCE = {
    "mt-bench": {"peagle": {3: 2.87, 7: 3.70}, "eagle3": {3: 2.70, 7: 3.27}},
    "humaneval": {"peagle": {3: 3.02, 7: 3.94}, "eagle3": {3: 2.65, 7: 3.03}},
    "speed-bench": {"peagle": {3: 2.87, 7: 3.38}, "eagle3": {3: 2.24, 7: 2.59}},
}
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
# Data set: the ratio at each concurrency.
RATIOS = {
    "mt-bench": (1.55, 1.29, 1.35, 1.28, 1.27, 1.09, 1.05),
    "humaneval": (1.55, 1.53, 1.45, 1.35, 1.31, 1.37, 1.23),
    "speed-bench": (1.69, 1.61, 1.54, 1.45, 1.40, 1.22, 1.25),
}


def ratio(data_set: str, concurrency: int) -> float | None:
    if concurrency not in CONCURRENCY:
        return None
    return RATIOS[data_set][CONCURRENCY.index(concurrency)]
