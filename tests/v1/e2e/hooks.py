# SPDX-License-Identifier: Apache-2.0
"""What tests do to engines, before they start and between steps.

Functions that take an `Engine` are for `VllmRunner.call`, the others for `setup`.
"""

from itertools import cycle
from types import SimpleNamespace

import torch

from vllm.config import get_layers_from_vllm_config
from vllm.config.drafter import length, target
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.interface import PauseState

from .runner import Engine


def take_defaults_of_a_gpu() -> None:
    """Trees are on by default, and trimming may be."""
    for module in (length, target):
        module.current_platform = SimpleNamespace(is_cpu=lambda: False)


def preempt_every(engine: Engine, count: int) -> None:
    """Preempts all requests every `count` steps."""
    scheduler = engine.scheduler

    def preempt(step: int) -> None:
        while step % count == 0 and scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)

    engine.after_step.append(preempt)


def pause_every(engine: Engine, count: int) -> None:
    """Pauses the scheduler for a step every `count` steps."""

    def pause(step: int) -> None:
        is_pause = step % count == 0
        state = PauseState.PAUSED_ALL if is_pause else PauseState.UNPAUSED
        if state != engine.scheduler.pause_state:
            engine.scheduler.set_pause_state(state)

    engine.after_step.append(pause)


def run_dummy_every(engine: Engine, count: int) -> None:
    """Runs a dummy batch, as an idle data-parallel rank does, every `count` steps.

    It must not change the KV cache.
    """

    def run(step: int) -> None:
        if step % count:
            return
        caches = engine.worker.model_runner.kv_caches
        before = [cache.clone() for cache in caches]
        engine.core.execute_dummy_batch()
        for old, new in zip(before, caches, strict=True):
            assert torch.equal(old, new), "a dummy batch changed the KV cache"

    engine.after_step.append(run)


def draft_by_turns(engine: Engine, lengths: list[int]) -> None:
    """Replaces the choice of "auto" by these draft lengths, in turn."""
    turns = cycle(lengths)
    chooser = engine.scheduler.step_drafts.policy.chooser
    chooser.choose = lambda *_: next(turns)


def timed_requests(engine: Engine) -> list[int]:
    """The batch sizes that "auto" has step times for."""
    policy = engine.scheduler.step_drafts.policy
    measured = {} if policy is None else policy.chooser.times.measured
    return sorted({size for by_size in measured.values() for size in by_size})


def drafter_name(engine: Engine) -> str:
    return type(getattr(engine.speculator, "drafter", engine.speculator)).__name__


def scale_kv_caches(engine: Engine) -> None:
    """Scales as checkpoints have them for fp8, of all layers; q's is for GPUs."""
    config = engine.worker.model_runner.vllm_config
    for layer in get_layers_from_vllm_config(config, Attention).values():
        layer._q_scale.fill_(0.03)
        layer._k_scale.fill_(0.06)
        layer._v_scale.fill_(0.02)
        layer._k_scale_float, layer._v_scale_float = 0.06, 0.02


def update_weights(
    engine: Engine, target: str = "", sent_target: str = "", sent_drafter: str = ""
) -> None:
    """Updates weights as after a training step, and drops cached KV of the old ones:
    from folders, which the target loads or which are sent."""
    llm = engine.llm
    if target:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": target})
    sent = {
        sent_target: llm.start_weight_update,
        sent_drafter: llm.start_draft_weight_update,
    }
    for folder, start in sent.items():
        if folder:
            start()
            llm.update_weights({"update_info": {"folder": folder}})
            llm.finish_weight_update()
    assert llm.reset_prefix_cache()


def sleep(engine: Engine, level: int, target: str) -> None:
    """Sleeps and wakes; after level 2 the target's weights are loaded again."""
    engine.llm.sleep(level)
    engine.llm.wake_up()
    if level == 2:
        update_weights(engine, target)


def attend_to_one_beam() -> None:
    """Setup: draft models cannot attend by the masks of several beams."""
    from vllm.v1.worker.gpu.spec_decode.unified import speculator

    speculator.why_layer_cannot = lambda layer: "attention by masks of no kind"
