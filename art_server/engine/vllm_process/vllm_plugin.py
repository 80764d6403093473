"""Our changes of vLLM, which loads this module in each of its processes (entry point `vllm.general_plugins`)."""

import os
import time

from art_server.shared.switches import DISTRIBUTIONS_SWITCH, EXPERTS_SWITCH, SWITCH

SPIN_SECONDS = 0.0005
"""Busy-wait this long before sleeping, for answers that come at once."""
POLL_SECONDS = 20e-6
"""Shortest sleep between two polls."""
POLL_SHARE = 0.02
"""Sleep for this share of the time waited so far."""
MAX_POLL_SECONDS = 1e-3
"""Longest sleep between two polls: an idle engine uses almost no CPU time."""


class Pause:
    """Waits between two polls of a process for a message of another process.

    vLLM polls without sleep for a second and only yields the core: on a machine with few cores this starves the
    processes that have work, and costs milliseconds for each token.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > SPIN_SECONDS:
            self._began = now  # a new wait begins
        if now - self._began < SPIN_SECONDS:
            os.sched_yield()
            self._last = now
        else:
            waited = now - self._began
            time.sleep(min(max(POLL_SECONDS, POLL_SHARE * waited), MAX_POLL_SECONDS))
            self._last = time.monotonic()


def install() -> None:
    """Installs counters of work, limits of grammars and, if requested, reports of what each token was sampled from. On a CPU also:
    forked processes, faster LoRA, right rotary embeddings, seeded requests, mixtures of experts, and waits that leave the cores to processes
    with work."""
    device = os.environ.get(SWITCH)
    if device is None:
        return
    # Imported here, because vLLM loads this module also in engines that no art-server started.
    from vllm.distributed.device_communicators import shm_broadcast

    from art_server.engine.vllm_process import counting, grammars, kept_sets

    if DISTRIBUTIONS_SWITCH in os.environ:
        kept_sets.install()
    grammars.install()
    counting.install(device)
    if device != "cpu":
        return
    from art_server.engine.vllm_process import cpu_lora, cpu_rope, forking, seeded

    forking.install()
    seeded.install()
    cpu_lora.install()
    cpu_rope.install()
    if EXPERTS_SWITCH in os.environ:
        cpu_lora.leave_experts_out()
    inspect_models_here()
    if not hasattr(shm_broadcast, "sched_yield"):
        raise ImportError("vLLM's message queue no longer calls sched_yield")
    shm_broadcast.sched_yield = Pause()


def inspect_models_here() -> None:
    """Has vLLM inspect a model's class in this process. vLLM starts another process for that, because an import could use a GPU.
    On a CPU that process only takes time: as much as all of vLLM's other imports, at the first start with a family."""
    from vllm.model_executor.models import registry

    if not hasattr(registry, "_run_in_subprocess"):
        raise ImportError("vLLM no longer inspects models by _run_in_subprocess")
    registry._run_in_subprocess = lambda inspect: inspect()
