# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows of code and results, and the checks of its pages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
