"""A tiny random base model, batches for it, and rows as the engine would have sampled them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from art.wire import LoRAConfig
from art_server.training.checkpoint import save_checkpoint
from art_server.training.optimizer import make_optimizer
from art_server.training.policy import Policy
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory

VOCABULARY = 128

MakeBatch = Callable[..., Batch]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small gain nothing from a second thread, and lose much when the other core is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers whose logits are far from uniform."""
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policy(base_dir: Path) -> Policy:
    return Policy(str(base_dir), torch.float32)


@pytest.fixture(scope="session")
def adapter_dir(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the default LoRA whose B is not zero, so that every matrix has a gradient."""
    policy.init_adapter(LoRAConfig(), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    save_checkpoint(policy, make_optimizer(policy.parameters, 1e-3), folder)
    return folder


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return random_batch


def random_batch(
    seed: int, *, num_groups: int = 3, group_size: int = 3, max_length: int = 24
) -> Batch:
    """Groups with unequal rewards; trajectories of one to three rows; trained runs between context runs."""
    rng = random.Random(seed)
    return Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(
                        reward=index + rng.random() / 2,
                        rows=[random_row(rng, max_length) for _ in range(rng.randint(1, 3))],
                    )
                    for index in range(group_size)
                ]
            )
            for _ in range(num_groups)
        ]
    )


def random_row(rng: random.Random, max_length: int) -> Row:
    length = rng.randint(2, max_length)
    trained = [index > 0 and rng.random() < 0.5 for index in range(length)]
    return Row(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        logprobs=[-rng.uniform(2, 8) if is_trained else None for is_trained in trained],
    )
