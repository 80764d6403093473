"""Forks vLLM's core and workers on a CPU, as vLLM does on CUDA. On a CPU vLLM starts new interpreters, one after another,
and each imports vLLM again: on two slow cores 25 s for each process, of a start of 88 s.

vLLM needs new interpreters because OpenMP reads only at its loading to which cores its threads are bound. A worker with several
threads is therefore still a new interpreter. A worker with one thread is forked, and its process is bound.
"""

import functools
import multiprocessing
import os
from typing import Any

from art_server.engine.vllm_process.kept_sets import patch_target
from art_server.shared.switches import ONE_THREAD_SWITCH


def install() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    _fork_from(utils)
    if ONE_THREAD_SWITCH not in os.environ:
        return
    _fork_from(multiproc_executor)
    worker_main = patch_target(multiproc_executor.WorkerProc, "worker_main")

    @functools.wraps(worker_main)
    def bound_worker_main(*args: Any, **kwargs: Any) -> Any:
        import torch

        cores = {int(core) for core in os.environ.get("GOMP_CPU_AFFINITY", "").split()}
        os.sched_setaffinity(0, cores or os.sched_getaffinity(0))
        torch.set_num_threads(1)
        return worker_main(*args, **kwargs)

    multiproc_executor.WorkerProc.worker_main = staticmethod(bound_worker_main)


def _fork_from(module: Any) -> None:
    patch_target(module, "get_mp_context")
    module.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
