# SPDX-License-Identifier: Apache-2.0
"""Fixtures that start servers."""

from collections.abc import Callable

import pytest

from .server import Server


@pytest.fixture(scope="module")
def serve(models, engine_env, engine_flags, tmp_path_factory) -> Callable[..., Server]:
    """Makes a server of the bundled target with the given flags."""

    def make(*flags: str) -> Server:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        env = engine_env | {"VLLM_LOG_STATS_INTERVAL": "1"}
        return Server(models / "target", [*engine_flags, *flags], env, log)

    return make
