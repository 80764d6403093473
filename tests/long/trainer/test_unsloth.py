"""UnslothPolicy equals Policy, on a CPU, in the environment of the `gpu` extra (scripts/setup-unsloth).

What only a GPU can show (bfloat16, compiled kernels, offloaded checkpoints) is not here.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.jobs.trainer_process import worker_environment
from art_server.shared.trainer_messages import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.batches import MicroBatch, make_micro_batches, make_train_batch
from art_server.trainer.job import train
from art_server.trainer.policy import ADAPTER_FILE, Policy
from tests.makers.forests import save_random_adapter

ROOT = Path(__file__).parents[3]
OWN_LENGTH = 256
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": OWN_LENGTH,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
}


def rollout(completion: list[int], reward: float) -> TrainableTrajectory:
    """After a prompt that all share."""
    prompt = [5, 9, 100, 3, 77, 41, 6, 120, 9, 33]
    logprobs = [None] * len(prompt) + [-4.0] * len(completion)
    return TrainableTrajectory(
        reward=reward, sequences=[TokenSequence(token_ids=prompt + completion, logprobs=logprobs)]
    )


BATCH = Batch(
    groups=[
        TrainableGroup(
            trajectories=[rollout([17, 30, 4, 2], 1.0), rollout([17, 64, 81, 90, 2], 0.0), rollout([99, 2], 0.3)]
        )
    ]
)
"""Few tokens: each takes the interpreter a tenth of a second and more."""


@dataclass(frozen=True)
class Run:
    """A family's model under both policies."""

    folder: Path
    policy: Policy

    @property
    def told(self) -> dict:
        return json.loads((self.folder / "told.txt").read_text())

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of Unsloth's environment, of 2.2 GB."""
    setup = subprocess.run([ROOT / "scripts" / "setup-unsloth"], capture_output=True, text=True)
    if setup.returncode:
        pytest.skip(f"scripts/setup-unsloth: {setup.stderr.strip()[-300:]}")
    return ROOT / ".venv-unsloth" / "bin" / "python"


@pytest.fixture(scope="module")
def runs(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One process computes for all families: Unsloth takes half a minute to import."""
    prepared = {name: prepare(tmp_path_factory.mktemp(name), name) for name in MODELS}
    working_dir, cache_dir = (tmp_path_factory.mktemp(name) for name in ("work", "cache"))
    environment = worker_environment(cache_dir, os.environ) | {
        "UNSLOTH_ALLOW_CPU": "1",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'art_client'}",
    }
    program = Path(__file__).parent / "unsloth_on_cpu.py"
    folders = [str(run.folder) for run in prepared.values()]
    done = subprocess.run([python, program, *folders], cwd=working_dir, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert list(working_dir.iterdir()) == []
    assert list(cache_dir.iterdir()) != []
    return prepared


def prepare(folder: Path, family: str) -> Run:
    torch.manual_seed(0)
    MODELS[family]().save_pretrained(folder / "base")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w3"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    ).save_pretrained(folder / "base")
    policy = Policy(str(folder / "base"), torch.float32)
    (folder / "adapter").mkdir()
    save_random_adapter(policy, folder / "adapter")
    batches = {"batch": BATCH, "one_row": pair(20), "one_token": pair(2), "too_long": pair(OWN_LENGTH + 2)}
    for name, batch in batches.items():
        (folder / f"{name}.json").write_text(batch.model_dump_json())
    return Run(folder, policy)


def pair(length: int) -> Batch:
    """Two equal sequences whose last token was sampled: one token less stands in front of it."""
    token_ids = [7 + index % 100 for index in range(length)]
    sequence = TokenSequence(token_ids=token_ids, logprobs=[None] * (length - 1) + [-1.0])
    members = [TrainableTrajectory(reward=reward, sequences=[sequence]) for reward in (0.0, 1.0)]
    return Batch(groups=[TrainableGroup(trajectories=members)])


def micro_batch(batch: Batch, *, shared: bool = True) -> MicroBatch:
    (packed,) = make_micro_batches(make_train_batch(batch).sequences, 100_000, shared=shared)
    return packed


def backward(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Log-probabilities; the gradient of their sum, weighted as in unsloth_on_cpu.py, is left in the parameters."""
    logprobs_N, _ = policy.logprobs(batch)
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(5))
    policy.model.zero_grad(set_to_none=True)
    (logprobs_N * weights_N).sum().backward()
    return logprobs_N.detach()


@pytest.fixture(params=MODELS)
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    family_run = runs[request.param]
    family_run.policy.use_trees(True)
    family_run.policy.load_adapter(LoRAConfig(), family_run.folder / "adapter")
    return family_run


def test_a_short_model_keeps_its_own_length_and_rope(run: Run) -> None:
    assert run.told["max_length"] == OWN_LENGTH
    assert run.told["rope"]["rope_type"] == "default"


@pytest.mark.parametrize("name", ["trees", "sequences"])
def test_log_probabilities_and_gradients_are_those_of_policy(run: Run, name: str) -> None:
    theirs = run.tensors(name)
    run.policy.use_trees(name == "trees")
    batch = micro_batch(BATCH, shared=name == "trees")
    assert batch.forest.num_tokens < batch.num_sequence_tokens or name == "sequences"
    logprobs_N = backward(run.policy, batch)
    assert (theirs["logprobs"] - logprobs_N).abs().max() < 1e-4
    for parameter, own in run.policy.parameters.items():
        assert own.grad is not None
        difference = theirs[f"gradient {parameter}"] - own.grad
        assert difference.norm() < 1e-3 * own.grad.norm(), parameter


def test_fused_kernels_in_16_bits_are_policy_but_for_rounding(runs: dict[str, Run]) -> None:
    run = runs["qwen3"]
    run.policy.use_trees(True)
    run.policy.load_adapter(LoRAConfig(), run.folder / "adapter")
    theirs = run.tensors("half")
    logprobs_N = backward(run.policy, micro_batch(BATCH))
    assert (theirs["logprobs"] - logprobs_N).abs().mean() < 0.01
    assert torch.equal(theirs["logprobs"], theirs["again"])
    for parameter, own in run.policy.parameters.items():
        assert own.grad is not None
        difference = theirs[f"gradient {parameter}"] - own.grad
        assert difference.norm() < 0.02 * own.grad.norm(), parameter


def test_reference_single_rows_single_tokens_and_fresh_adapters_are_those_of_policy(run: Run) -> None:
    theirs = run.tensors("other")
    batch = micro_batch(BATCH)
    reference_N = run.policy.reference_logprobs(batch)
    for name, expected in {
        "reference": reference_N,
        "fresh": reference_N,
        "plain sequence": run.policy.sequence_logprobs(pair(20).groups[0].trajectories[0].sequences[0].token_ids),
        "one token": run.policy.logprobs(micro_batch(pair(2)))[0].detach(),
    }.items():
        assert (theirs[name] - expected).abs().max() < 1e-4, name


def test_a_step_is_that_of_policy_and_its_checkpoint_loads_there(run: Run, tmp_path: Path) -> None:
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(run.folder / "adapter"),
        out_dir=str(tmp_path / "trained"),
        config=TrainConfig(learning_rate=1e-3),
        batch=BATCH,
    )
    expected = train(run.policy, task, 100_000, lambda _: None).metrics
    metrics = run.told["metrics"]
    assert metrics["data/step_is_shared"] == 1
    assert metrics["data/step_tree_gap"] < 1e-4
    for name in ("loss/train", "loss/grad_norm", "loss/entropy"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name

    before = load_file(run.folder / "adapter" / ADAPTER_FILE)
    ours = load_file(tmp_path / "trained" / ADAPTER_FILE)
    run.policy.load_adapter(LoRAConfig(), run.folder / "trained")
    run.policy.save_adapter(tmp_path)
    theirs = load_file(tmp_path / ADAPTER_FILE)
    for name, old in before.items():
        assert (theirs[name] - ours[name]).norm() < 0.02 * (ours[name] - old).norm(), name


def test_its_checkpointing_stays_on_after_a_step(run: Run) -> None:
    assert run.told["checkpointing"] == [True, True]


def test_rows_beyond_the_models_length_are_refused(run: Run) -> None:
    assert "a sequence of 257 tokens is longer than the 256" in run.told["too long"]


def test_a_model_with_stretched_rope_trains_nothing(run: Run) -> None:
    assert "--trainer unsloth computes another policy" in run.told["stretched"]
