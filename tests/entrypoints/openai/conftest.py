# SPDX-License-Identifier: Apache-2.0
"""Servers for tests."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from .server import Server

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def serve(models, engine_env, engine_flags, tmp_path_factory) -> Serve:
    """Context manager: a healthy server of the bundled target, with these flags."""

    @contextlib.contextmanager
    def started(*flags: str) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        env = engine_env | {"VLLM_LOG_STATS_INTERVAL": "1"}
        server = Server(models / "target", [*engine_flags, *flags], env, log)
        try:
            server.wait_until_healthy()
            yield server
        finally:
            server.kill()

    return started
