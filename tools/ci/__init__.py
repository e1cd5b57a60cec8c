# SPDX-License-Identifier: Apache-2.0
"""The pipelines of `.buildkite/`: checked, generated for a change, run at home."""
