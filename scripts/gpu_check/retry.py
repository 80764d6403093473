"""A step that runs out of memory is retried with a smaller budget."""

import torch

from gpu_check.machine import GIB, Cases, Line, Machine, RandomPolicy, step_gradient


def retry(machine: Machine) -> Cases:
    def run_out() -> Line:
        if not machine.is_gpu:
            return {"ok": None, "skipped": "a CPU has no limit for one process"}
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(24 * GIB / total)
        try:
            from art_server.trainer.token_budget import TokenBudget

            shape, notes = machine.shape("4b"), []
            policy = RandomPolicy(shape, machine.dtype, machine.device)
            groups = machine.groups(shape, machine.cell(prompt=8192, completion=1024))
            budget = TokenBudget(policy, notes, 65_536)
            budget.run(lambda tokens: step_gradient(policy, groups, tokens))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return {"retries": budget.num_retries, "notes": notes, "ok": budget.num_retries > 0}

    yield "4b in 24 GiB", run_out
