"""A tiny random base model, batches for it, and sequences as the engine would have sampled them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from art_server.shared.trainer_messages import Batch, TokenSequence, TrainableGroup, TrainableTrajectory
from art_server.trainer.policy import Policy
from tests.makers.architectures import ARCHITECTURES, start
from tests.makers.forests import save_random_adapter

VOCABULARY = 128

MakeBatch = Callable[..., Batch]


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


@pytest.fixture(autouse=True)
def trees_again(policy: Policy) -> Iterator[None]:
    """The shared policy starts each test on trees, which it has not checked yet."""
    policy.use_trees(True)
    policy.tree_gap = None
    yield


@pytest.fixture(scope="session")
def adapter_dir(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_adapter(policy, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path]:
    """A random model of the architecture and a checkpoint of it."""
    return start(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return random_batch


def random_batch(
    seed: int, *, num_groups: int = 3, group_size: int = 3, max_length: int = 24, num_openings: int = 0
) -> Batch:
    """Groups with unequal rewards; trajectories of one to three sequences; trained runs between context runs.

    With `num_openings` sequences begin with parts of so many common sequences, and go on with few different tokens.
    """
    rng = random.Random(seed)
    openings = [[rng.randrange(VOCABULARY) for _ in range(max_length)] for _ in range(num_openings)]

    def sequence() -> TokenSequence:
        drawn = random_sequence(rng, max_length)
        if not openings:
            return drawn
        opening = rng.choice(openings)[: rng.randint(0, len(drawn.token_ids))]
        rest = [token % 3 for token in drawn.token_ids[len(opening) :]]
        return TokenSequence(token_ids=opening + rest, logprobs=drawn.logprobs)

    return Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(
                        reward=index + rng.random() / 2, sequences=[sequence() for _ in range(rng.randint(1, 3))]
                    )
                    for index in range(group_size)
                ]
            )
            for _ in range(num_groups)
        ]
    )


def random_sequence(rng: random.Random, max_length: int) -> TokenSequence:
    length = rng.randint(2, max_length)
    trained = [index > 0 and rng.random() < 0.5 for index in range(length)]
    return TokenSequence(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        logprobs=[-rng.uniform(2, 8) if is_trained else None for is_trained in trained],
    )
