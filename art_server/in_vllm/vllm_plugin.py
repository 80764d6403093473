"""What we change in vLLM's own processes; it loads this in each of them (entry point `vllm.general_plugins`)."""

import os
import time

from art_server.shared.switches import EXPERTS_SWITCH, SWITCH

SPIN_SECONDS = 0.0005
"""A wait spins for this long, which serves answers that come at once best..."""
POLL_SECONDS = 20e-6
"""...and then sleeps between two looks,"""
POLL_SHARE = 0.02
"""by this much of the time waited so far,"""
MAX_POLL_SECONDS = 1e-3
"""so that an idle engine costs next to nothing."""


class Pause:
    """Between two looks of one process for a message of another.

    vLLM's spins, yielding the core, for a second: on a machine of few cores that starves the processes that have work, by
    milliseconds a token.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > SPIN_SECONDS:
            self._began = now  # another wait
        if now - self._began < SPIN_SECONDS:
            os.sched_yield()
            self._last = now
        else:
            waited = now - self._began
            time.sleep(min(max(POLL_SECONDS, POLL_SHARE * waited), MAX_POLL_SECONDS))
            self._last = time.monotonic()


def install() -> None:
    """Figures of what each token was sampled from, and of the work done; on a CPU also faster LoRA, mixtures of experts, and
    waits that leave the cores to those that have work."""
    device = os.environ.get(SWITCH)
    if device is None:
        return
    # Here, because vLLM loads this module in processes of engines that are not ours, too.
    from vllm.distributed.device_communicators import shm_broadcast

    from art_server.in_vllm import counting, kept_sets

    kept_sets.install()
    counting.install(device)
    if device != "cpu":
        return
    from art_server.in_vllm import cpu_lora, forking

    forking.install()
    cpu_lora.install()
    if EXPERTS_SWITCH in os.environ:
        cpu_lora.leave_experts_out()
    if not hasattr(shm_broadcast, "sched_yield"):
        raise ImportError("vLLM's message queue no longer calls sched_yield")
    shm_broadcast.sched_yield = Pause()
