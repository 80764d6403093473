"""Ranks on machines that are unlike each other: what is made alike, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import TrainConfig
from art_server.jobs.trainer_process import TrainerError
from tests.ranks import BUDGET, RATE, World, difference, running

FLEX = """
from art_server.trainer import attention, facts, policy
facts.default_kind = policy.default_kind = lambda device: "flex"
policy.flex_padding = lambda num_tokens: 0
of = attention.ForestAttention.of.__func__
attention.ForestAttention.of = classmethod(lambda cls, forest, kind, device: of(cls, forest, "segments", device))
"""
"""Attention that has to be tried, as on a GPU."""

SMALL_TREES = "from art_server.trainer import policy\nif rank: policy.fill_tokens = lambda device: 16"

MADE_ALIKE: dict[str, tuple[dict[str, Any], str, int]] = {
    "numbers": ({"max_tokens_per_micro_batch": 8 * BUDGET, "checkpointing_factor": 1.0}, SMALL_TREES, BUDGET),
    "default tokens": ({"max_tokens_per_micro_batch": BUDGET // 2}, "", BUDGET // 2),
    "more default tokens": ({"max_tokens_per_micro_batch": 8 * BUDGET}, "", BUDGET),
    "checkpointing factor": ({"checkpointing_factor": 1.0}, "", BUDGET),
    "tokens of small trees": ({}, SMALL_TREES, BUDGET),
    "threads": ({"threads": 2}, "", BUDGET),
    "trees that are compiled": ({}, FLEX, BUDGET),
    "trees that one card cannot compile": (
        {},
        FLEX
        + """
def fail(gradient):
    raise NotImplementedError("out of resource: shared memory")
if is_last:
    own = policy.Policy.logprobs
    def logprobs(self, batch, **options):
        logprobs_N, more = own(self, batch, **options)
        if batch.is_shared and logprobs_N.requires_grad:
            logprobs_N.register_hook(fail)
        return logprobs_N, more
    policy.Policy.logprobs = logprobs
""",
        BUDGET,
    ),
}
"""What differs, and the tokens of a micro-batch that all ranks then have."""


def check_made_alike(world: World, tmp_path: Path, name: str) -> None:
    """Checks that all ranks plan as the first decides, so that each token is computed once: by the reference, too, which has a
    plan."""
    unlike, code, tokens = MADE_ALIKE[name]
    config = TrainConfig(learning_rate=RATE, beta=0.1)
    is_given_up = "one card" in name
    with running(world.base, tmp_path / "ranks-1", 1, {}, code, max_tokens_per_micro_batch=tokens) as alone:
        one = alone if is_given_up else world.gang(1)
        one.train(world.start, tmp_path / "one", config, world.batches[:2])
    with running(world.base, tmp_path / "ranks-2", 2, unlike, code, max_tokens_per_micro_batch=BUDGET) as several:
        done, _ = several.train(world.start, tmp_path / "two", config, world.batches[:2])
    # The first moments after one step are the clipped gradient, times a tenth.
    assert difference(tmp_path / "one/1/optimizer.safetensors", tmp_path / "two/1/optimizer.safetensors") < 1e-6
    assert difference(tmp_path / "one/2/adapter_model.safetensors", tmp_path / "two/2/adapter_model.safetensors") < 1e-6
    assert done.environment["max_tokens"] == str(tokens)
    notes = [note for note in done.notes if "prefixes are not shared" in note]
    assert bool(notes) == (done.metrics["data/step_is_shared"] == 0.0) == is_given_up
    assert all("out of resource" in note and "host 1" in note for note in notes)
    if name in ("numbers", "more default tokens", "checkpointing factor", "tokens of small trees"):
        world.gang(2).train(world.start, tmp_path / "alike", config, world.batches[:2])
        states = [tmp_path / of / "2/optimizer.safetensors" for of in ("alike", "two")]
        assert states[0].read_bytes() == states[1].read_bytes(), "the same number of ranks makes the same bits"


UNLIKE: dict[str, tuple[dict[str, Any], str, str]] = {
    "number type": ({"dtype": "bfloat16"}, "", "number type float32 and bfloat16"),
    "attention": (
        {},
        "from art_server.trainer import facts\nif rank: facts.default_kind = lambda device: 'flex'",
        "attention segments and flex",
    ),
    "build": ({}, "import torch\nif rank: torch.__version__ = '1.0+cu1'", "and 1.0+cu1"),
    "attention of separate sequences": (
        {},
        "from art_server.trainer import policy\nif rank: policy.usual_attention = lambda *_: 'eager'",
        "attention of separate sequences sdpa and eager",
    ),
    "plan": (
        {},
        """
from art_server.trainer import checking
make = checking.make_micro_batches
if rank: checking.make_micro_batches = lambda chosen, max_tokens, **more: make(chosen, max_tokens // 2, **more)
""",
        "number of micro-batches",
    ),
    "checkpointing": (
        {},
        "from art_server.trainer.policy import Policy\nif rank: Policy.uses_checkpointing = True",
        "gradient checkpointing False and True",
    ),
}


def check_refused(world: World, tmp_path: Path, name: str) -> None:
    """Checks that the error names both machines and what differs. The job is not its cause, and no process died."""
    unlike, code, said = UNLIKE[name]
    with running(
        world.base, tmp_path / "two", 2, unlike, code, on_hosts=True, max_tokens_per_micro_batch=BUDGET
    ) as two:
        with pytest.raises(TrainerError) as caught:
            two.train(world.start, tmp_path / "out", TrainConfig(learning_rate=RATE), world.batches[:1])
        assert set(two.gang.pids.values()) == {None}
    error = caught.value
    assert (error.code, error.retryable) == ("unlike_ranks", True)
    assert "host 0" in error.message and "host 1" in error.message and said in error.message
    assert not list((tmp_path / "out").glob("*/*.safetensors"))
