"""Runs one arm of scripts/bench/trainer in its own process. For each line on stdin it takes one step and writes the
step's figures to stdout as a JSON line.

arms.py ours|rows|trl_best|trl_checkpointed|trl_shipped FOLDER
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LEARNING_RATE = 1e-4
NUM_EQUAL_STEPS = 3

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    cell = json.loads((root / "cell.json").read_text())
    torch.set_num_threads(cell["settings"]["threads"])
    if name.startswith("trl"):
        run_trl(name, root, cell["settings"], cell["groups"])
    else:
        run_ours(name, root, cell["settings"], cell["groups"])


start_mb = 0


def await_command() -> None:
    """Waits until the parent process requests a step; exits when stdin is closed."""
    global start_mb
    if not start_mb:
        start_mb = memory_mb()
    if not sys.stdin.readline():
        sys.exit()


def memory_mb() -> int:
    """The memory of this process: allocated GPU memory where CUDA is available, resident memory elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() // 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def peak_mb() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def now() -> tuple[float, float]:
    """CPU and wall-clock seconds, read after the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()


def answer(name: str, root: Path, index: int, figures: dict, weights: dict) -> None:
    if index == NUM_EQUAL_STEPS - 1:
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in weights.items()},
            root / f"{name}.safetensors",
        )
    figures["peak_mb"] = peak_mb()
    figures["start_mb"] = start_mb
    answers.write(json.dumps(figures) + "\n")
    answers.flush()


def run_ours(name: str, root: Path, settings: dict, groups: list[list[dict]]) -> None:
    """Runs our trainer; the arm "rows" computes each sequence alone, without prefix trees."""
    dtype = getattr(torch, settings["dtype"])
    take_step, policy = prepare_ours(name, root, settings, groups, dtype)
    for index in range(settings["steps"]):
        await_command()
        cpu, wall = now()
        metrics = take_step()
        cpu_after, wall_after = now()
        figures = {
            "cpu_seconds": cpu_after - cpu,
            "wall_seconds": wall_after - wall,
            "grad_norm": metrics["loss/grad_norm"],
            "computed_tokens": metrics["data/step_computed_tokens"],
        }
        weights = {key.replace(".default", ""): parameter for key, parameter in policy.parameters.items()}
        if index == settings["steps"] - 1 and policy.device.type == "cpu":
            figures["gemm_share"] = measure_gemm_share(take_step)
        answer(name, root, index, figures, weights)


def prepare_ours(
    name: str,
    root: Path,
    settings: dict,
    groups: list[list[dict]],
    dtype: torch.dtype = torch.float32,
) -> tuple[Callable[[], dict[str, float]], Any]:
    """Returns a function that takes one step and returns its metrics, and the policy."""
    from art_protocol.wire import LoRAConfig
    from art_server.trainer.memory import return_freed_memory
    from art_server.trainer.policy import Policy

    return_freed_memory()
    policy = Policy(str(root / "base"), dtype)
    policy.load_adapter(LoRAConfig(), root / "adapter")
    if name == "rows":
        policy.use_trees(False)
    return prepare_step(policy, groups, settings["budget"]), policy


def make_task(groups: list[list[dict]]) -> Any:
    """A TrainTask of these groups, without folders. The rows have no log-probabilities of an engine, so that importance ratios
    are 1, as in TRL's arms."""
    from art_protocol.wire import LoRAConfig, TrainConfig
    from art_server.shared.trainer_messages import (
        Batch,
        TokenSequence,
        TrainableGroup,
        TrainableTrajectory,
        TrainTask,
    )

    def trajectory(row: dict) -> TrainableTrajectory:
        tokens, first = row["tokens"], row["num_context"]
        trained = TokenSequence(
            token_ids=tokens,
            logprobs=[None] * len(tokens),
            recompute=list(range(first, len(tokens))),
        )
        return TrainableTrajectory(reward=row["reward"], sequences=[trained])

    return TrainTask(
        lora=LoRAConfig(),
        in_dir="",
        out_dir="",
        config=TrainConfig(scaling="none", max_grad_norm=1e9),
        batch=Batch(groups=[TrainableGroup(trajectories=[trajectory(row) for row in rows]) for rows in groups]),
    )


def prepare_step(policy: Any, groups: list[list[dict]], budget: int = 0) -> Callable[[], dict[str, float]]:
    """Returns a function that trains the policy on these groups for one step and returns the metrics."""
    from art_server.trainer.batches import make_train_batch
    from art_server.trainer.optimizer import make_optimizer
    from art_server.trainer.step import compute_gradient

    optimizer = make_optimizer(policy.parameters, LEARNING_RATE)
    task = make_task(groups)

    def take_step() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        trained = make_train_batch(task.batch, task.config)
        metrics = compute_gradient(policy, task, trained, budget or policy.default_tokens, lambda _: None, [])
        optimizer.step()
        return metrics

    return take_step


def measure_gemm_share(take_step: Any) -> float:
    """The share of a step's CPU time spent in matrix products and attention; the rest is overhead."""
    products = ("aten::mm", "aten::addmm", "aten::bmm", "flash_attention_for_cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step()
    events = profile.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    inside = sum(event.self_cpu_time_total for event in events if any(name in event.key for name in products))
    return round(inside / total, 3)


def run_trl(name: str, root: Path, settings: dict, groups: list[list[dict]]) -> None:
    """Runs TRL 1.16's GRPOTrainer. All arms but "trl_shipped" compute the output head at completion positions only,
    which TRL itself does only with Triton. "trl_checkpointed" uses gradient checkpointing, TRL's default."""
    import art_server  # noqa: F401  # isort: skip - first, for torchvision
    import trl.trainer.utils
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if name != "trl_shipped":
        trl.trainer.utils._use_triton = lambda device: True
    size = len(groups[0])
    num_rows = sum(len(rows) for rows in groups)
    batch = settings["trl_batch"] or size
    all_rows = [row for rows in groups for row in rows]
    completions = [row["tokens"][row["num_context"] :] for row in all_rows]
    rewards = {tuple(ids): row["reward"] for ids, row in zip(completions, all_rows, strict=True)}

    def rollout(prompts: list[str], trainer: Any) -> dict:
        return {
            "prompt_ids": [row["tokens"][: row["num_context"]] for row in all_rows],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [rewards[tuple(ids)] for ids in completion_ids]

    class Timed(GRPOTrainer):
        """Measures the preparation of inputs, which is not part of the step."""

        outside = (0.0, 0.0)

        def _prepare_inputs(self, inputs: Any) -> Any:
            cpu, wall = now()
            prepared = super()._prepare_inputs(inputs)
            cpu_after, wall_after = now()
            Timed.outside = (
                Timed.outside[0] + cpu_after - cpu,
                Timed.outside[1] + wall_after - wall,
            )
            return prepared

    class Turn(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            await_command()
            Timed.outside = (0.0, 0.0)
            self.cpu, self.wall = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            cpu, wall = now()
            self.figures = {
                "cpu_seconds": cpu - self.cpu - Timed.outside[0],
                "wall_seconds": wall - self.wall - Timed.outside[1],
            }

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if "grad_norm" in logs:
                self.figures["grad_norm"] = float(logs["grad_norm"])
                weights = {
                    key.replace(".default", ""): parameter
                    for key, parameter in model.named_parameters()
                    if parameter.requires_grad
                }
                answer(name, root, state.global_step - 1, self.figures, weights)

    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=getattr(torch, settings["dtype"]))
    model = PeftModel.from_pretrained(base, str(root / "adapter"), is_trainable=True)
    accumulation = num_rows // batch
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(root / name),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_generations=size,
            num_iterations=1,
            max_steps=settings["steps"],
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="none",
            max_grad_norm=1e9,
            max_completion_length=max(map(len, completions)),
            bf16=False,
            gradient_checkpointing=name == "trl_checkpointed",
            use_cpu=not torch.cuda.is_available(),
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"t{10 + i}"} for i in range(len(groups))]),
        processing_class=AutoTokenizer.from_pretrained(root / "base"),
        rollout_func=rollout,
        callbacks=[Turn()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
