"""A program of test_families.py: trains one step of a toy model, then vLLM scores a text with the trained adapter.

It prints two JSON lines. The first is about the memory plan and the step. The second has the largest difference between the
log-probabilities of trainer and engine, for the base and with the adapter, over the text and the tokens that the engine then
samples. In bfloat16 it also has the mean difference with the adapter, and the mean that the trainer's own rounding to bfloat16
makes. Or it says why a CPU does not serve the family. vLLM, with our plugin, computes in a process of its own: some families
are served by transformers' class, which vLLM changes.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.engine import command
from art_server.engine.device.model_size import read_model_size
from art_server.engine.device.plan import GIB, Card, Demand, make_memory_plan
from art_server.errors import InvalidInput
from art_server.settings import NumberType, ServerConfig
from art_server.shared import switches
from art_server.shared.trainer_messages import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.store.base_facts import read_facts
from art_server.store.base_models import BaseModel, check_on_cpu, check_trainable, weight_files
from art_server.trainer.base import load_base
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.makers.first_steps import write_first_checkpoint
from tests.makers.toy_models import make_model

LORA = LoRAConfig(rank=8)
NUM_SAMPLED = 8
MAX_LENGTH = 128
LARGEST = 1e-4
"""Difference of log-probabilities in float32."""
WITHIN = {"apertus": 0.02}
"""Larger ones: vLLM computes parameters of Apertus' activation in bfloat16."""
ROUNDINGS = 2
"""Their mean difference in bfloat16, in those that the trainer's own rounding makes. 0.6 to 1.63 have been seen."""
LEARNING_RATE = 0.03
"""Large, so that one step changes log-probabilities by more than any rounding."""


def main() -> None:
    os.environ[switches.EXPERTS_SWITCH] = "1"  # each process reads it once
    token_ids = random.Random(0).choices(range(3, 1300), k=60)
    family = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        for figures in measure(family, Path(folder), token_ids):
            print(json.dumps({"family": family, **figures}), flush=True)


def measure(family: str, folder: Path, token_ids: list[int]) -> Iterator[dict[str, Any]]:
    base, after = make_model(family, folder / "base"), folder / "0001"
    facts = read_facts(base)
    check_trainable(BaseModel(family, base))
    number_type, _ = ServerConfig().number_types("cpu", has_delta_rule=facts.has_delta_rule)
    size = read_model_size(base, facts)
    demand = Demand(family, size, engine_itemsize=2, trainer_itemsize=2, lora_rank=8, max_loras=4)
    planned = make_memory_plan(Card("a card", 16 * GIB, 64 * GIB), demand)
    policy, grad_norm = take_step(base, folder, after)
    policy.use_context(MAX_LENGTH)
    yield {
        "kv_tokens": planned.kv_tokens,
        "counted": [size.num_parameters, size.lora_width * LORA.rank],
        "there": [
            sum(tensor.numel() for file in weight_files(base) for tensor in load_file(file).values()),
            sum(parameter.numel() for parameter in policy.parameters.values()),
        ],
        "changed": changed_weights(policy, base),
        "trees": policy.shares_prefixes,
        "grad_norm": grad_norm,
        "number_type": number_type,
    }
    try:
        check_on_cpu(BaseModel(family, base))
    except InvalidInput as error:
        yield {"refused": error.message}
        return
    engine = start_engine(family, base, number_type)
    whole, engine_logprobs = score(engine, token_ids, after)
    trained = policy.sequence_logprobs(whole)
    gaps = {"trained": float((engine_logprobs - trained).abs().max())}
    if number_type == "bfloat16":
        rounded = Policy(str(base), torch.bfloat16)
        rounded.load_adapter(LORA, after)
        gaps["mean"] = float((engine_logprobs - trained).abs().mean())
        gaps["rounding"] = float((rounded.sequence_logprobs(whole) - trained).abs().mean())
    with policy.model.disable_adapter():
        gaps["moved"] = float((trained - policy.sequence_logprobs(whole)).abs().max())
        whole, engine_logprobs = score(engine, token_ids, None)
        gaps["base"] = float((engine_logprobs - policy.sequence_logprobs(whole)).abs().max())
    yield gaps


def agree(line: dict[str, Any]) -> bool:
    """Whether engine and trainer compute the same, by the figures of both lines."""
    if line["number_type"] == "bfloat16":
        return line["mean"] < ROUNDINGS * line["rounding"]
    return max(line["base"], line["trained"]) < WITHIN.get(line["family"], LARGEST)


def start_engine(family: str, base: Path, number_type: NumberType) -> Any:
    """vLLM's LLM. Any: it is imported when it starts."""
    os.environ |= command.engine_environment(ServerConfig(), BaseModel(family, base), "cpu", {})
    # Imported here, because vLLM reads the environment at import.
    from vllm import LLM

    facts = read_facts(base)
    attention: dict[str, Any] = {
        name.replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in command.attention_on_cpu(facts).items()
    }
    return LLM(
        str(base),
        enable_lora=True,
        max_lora_rank=LORA.rank,
        lora_target_modules=list(facts.layers.last_names) if facts.is_mixture else None,
        dtype=number_type,
        max_model_len=MAX_LENGTH,
        hf_overrides=facts.overrides,
        enforce_eager=True,
        language_model_only=True,
        **attention,
    )


def take_step(base: Path, folder: Path, after: Path) -> tuple[Policy, float]:
    """The policy after a step, whose adapter is in the folder `after`, and the gradient's norm."""
    write_first_checkpoint(str(base), LORA, 0, folder / "0000")
    policy = Policy(str(base))
    task = TrainTask(
        lora=LORA,
        in_dir=str(folder / "0000"),
        out_dir=str(after),
        config=TrainConfig(learning_rate=LEARNING_RATE),
        batch=a_group(),
    )
    done = train(policy, task, 4096, lambda _: None)
    return policy, done.metrics["loss/grad_norm"]


def changed_weights(policy: Policy, base: Path) -> list[str]:
    """Names of the base's weights, those of towers and routers too, that are not as in its files."""
    loaded = load_base(str(base), torch.float32, torch.device("cpu"))
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
        for name, parameter in policy.model.named_parameters()
        if not parameter.requires_grad
    }
    there = dict(loaded.named_parameters())
    assert kept.keys() == there.keys()
    return [name for name, parameter in kept.items() if not parameter.equal(there[name])]


def a_group() -> Batch:
    """Sequences with a common prompt, and rewards that differ."""
    rng = random.Random(1)
    prompt = rng.choices(range(3, 1300), k=20)
    trajectories = []
    for reward in range(4):
        answer = rng.choices(range(3, 1300), k=20)
        logprobs = [None] * len(prompt) + [-7.0] * len(answer)
        sequence = TokenSequence(token_ids=prompt + answer, logprobs=logprobs)
        trajectories.append(TrainableTrajectory(reward=float(reward), sequences=[sequence]))
    return Batch(groups=[TrainableGroup(trajectories=trajectories)])


def score(engine: Any, token_ids: list[int], adapter: Path | None, number: int = 1) -> tuple[list[int], torch.Tensor]:
    """The text with the tokens that the engine samples after it, and the engine's log-probability of each token but the
    first. Adapters have different numbers. Any: vLLM's LLM."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    request = LoRARequest(f"adapter {number}", number, str(adapter)) if adapter is not None else None
    (answer,) = engine.generate(
        {"prompt_token_ids": token_ids},
        SamplingParams(max_tokens=NUM_SAMPLED, prompt_logprobs=0, logprobs=0, seed=0, ignore_eos=True),
        lora_request=request,
        use_tqdm=False,
    )
    sampled = answer.outputs[0]
    whole = [*token_ids, *sampled.token_ids]
    said = zip(whole[1:], [*answer.prompt_logprobs[1:], *sampled.logprobs], strict=True)
    return whole, torch.tensor([entries[token].logprob for token, entries in said])


if __name__ == "__main__":
    main()
