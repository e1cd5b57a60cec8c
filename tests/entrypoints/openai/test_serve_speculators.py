# SPDX-License-Identifier: Apache-2.0
"""`vllm serve <a head of speculators>` alone: it names its target and how it drafts."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.v1.e2e.oracle import choices, load_model

from .server import Server
from .test_spec_decode_server import (
    CODE,
    GREEDY,
    WITH_TOKENS,
    spec_decode_counters,
    spec_decode_labels,
)

NUM_SPEC_TOKENS = 8  # as models/peagle says
REFUSED = "must name a remote model repository"  # where vLLM takes no local target


@pytest.mark.slow
def test_a_head_alone(
    models: Path,
    engine_env,
    engine_flags,
    takes_local_verifiers,
    tmp_path,
    monkeypatch,
):
    # Where its config finds the target: models/target.
    monkeypatch.chdir(ROOT)
    log = tmp_path / "log.txt"
    server = Server(models / "peagle", engine_flags, engine_env, log)
    try:
        if not takes_local_verifiers:
            with pytest.raises(AssertionError, match=REFUSED):
                server.wait_until_healthy()
            return
        server.wait_until_healthy()
        answer = server.client.completions.create(
            prompt=CODE, **GREEDY, extra_body=WITH_TOKENS
        )
        (said,) = answer.choices
        whole = said.prompt_token_ids + said.token_ids
        alone = choices(load_model(models / "target"), whole)
        assert said.token_ids == alone[len(said.prompt_token_ids) - 1 : -1]
        assert len(said.token_ids) == GREEDY["max_tokens"]
        found = spec_decode_counters(server)
        assert found["num_accepted_tokens_total"] > 0
        drafted = found["num_draft_tokens_total"] / found["num_drafts_total"]
        assert NUM_SPEC_TOKENS - 1 < drafted <= NUM_SPEC_TOKENS
        for labels in spec_decode_labels(server).values():
            assert (labels["method"], labels["mode"]) == ("eagle3", "peagle")
        status, alive = server.terminate()
        assert status == 0 and not alive
    finally:
        server.kill()
