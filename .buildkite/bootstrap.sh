#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Uploads the steps that a build needs: all of them on the main branch, else those that
# its changes concern. NIGHTLY=1 runs optional steps without asking.
set -euo pipefail
cd "$(dirname "$0")/.."

main=${BUILDKITE_PIPELINE_DEFAULT_BRANCH:-main}
if [[ ${BUILDKITE_BRANCH:-} == "$main" || ${NIGHTLY:-0} == 1 ]]; then
  which=(--all)
else
  git fetch --quiet origin "${BUILDKITE_PULL_REQUEST_BASE_BRANCH:-$main}"
  which=(--since FETCH_HEAD)
fi
[[ ${NIGHTLY:-0} != 1 ]] || which+=(--nightly)

python=python3
if ! $python -c 'import yaml' 2> /dev/null; then
  $python -m venv build/ci-venv
  python=build/ci-venv/bin/python
  $python -m pip install --quiet pyyaml
fi
$python -m tools.ci "${which[@]}" | buildkite-agent pipeline upload
