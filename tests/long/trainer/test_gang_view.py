"""Every loss with one, two and three ranks, and a rank that is killed or stopped in every phase."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from art_protocol.wire import TrainConfig
from art_server.jobs import trainer_process
from art_server.jobs.trainer_process import TrainerDied
from art_server.shared.trainer_messages import Batch, TokenSequence, TrainableGroup
from tests.makers.architectures import ARCHITECTURES, CONFIGS
from tests.ranks import RATE, World, difference
from tests.unlike_ranks import MADE_ALIKE, UNLIKE, check_made_alike, check_refused

STAGES = [("load", 1), ("forward", 0), ("forward", 1), ("backward", 1), ("reduce", 0), ("reduce", 1), ("save", 0)]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack, request.param)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_ranks_are_one(world: World, tmp_path: Path, name: str) -> None:
    config = CONFIGS[name].model_copy(update={"learning_rate": RATE, "max_grad_norm": 1.0})
    world.gang(1).train(world.start, tmp_path / "one", config, world.batches)
    for gang in (world.gang(2), world.gang(3), world.gang(2, is_sharded=True)):
        out = tmp_path / gang.folder.name
        gang.train(world.start, out, config, world.batches)
        assert difference(tmp_path / "one/1/optimizer.safetensors", out / "1/optimizer.safetensors") < 1e-6
        assert difference(tmp_path / "one/3/adapter_model.safetensors", out / "3/adapter_model.safetensors") < 1e-6


def with_advantages(batch: Batch) -> Batch:
    """The batch of a teacher: each sampled token has an advantage of its own."""

    def teach(sequence: TokenSequence) -> TokenSequence:
        sampled = [index for index, value in enumerate(sequence.logprobs) if value is not None]
        return sequence.model_copy(update={"advantages": {index: math.sin(index) for index in sampled}})

    groups: list[TrainableGroup] = []
    for group in batch.groups:
        taught = [
            trajectory.model_copy(update={"sequences": [teach(sequence) for sequence in trajectory.sequences]})
            for trajectory in group.trajectories
        ]
        groups.append(group.model_copy(update={"trajectories": taught}))
    return batch.model_copy(update={"groups": groups})


@pytest.mark.parametrize("option", ["checkpointing", "half the budget", "advantages of tokens", "continued"])
def test_options_of_a_job_and_a_checkpoint_of_two_ranks(world: World, tmp_path: Path, option: str) -> None:
    config = TrainConfig(learning_rate=RATE)
    fields = {"checkpointing": {"checkpointing": True}, "half the budget": {"budget_divisor": 2}}.get(option, {})
    batches, start = world.batches, world.start
    if option == "advantages of tokens":
        batches = [with_advantages(batch) for batch in batches]
    if option == "continued":
        world.gang(2).train(world.start, tmp_path / "before", config, batches[:1])
        batches, start = batches[1:], tmp_path / "before/1"
    world.gang(1).train(start, tmp_path / "one", config, batches, **fields)
    last = str(len(batches))
    for gang in (world.gang(2), world.gang(3), world.gang(2, is_sharded=True)):
        out = tmp_path / gang.folder.name
        gang.train(start, out, config, batches, **fields)
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert difference(tmp_path / "one" / last / file, out / last / file) < 1e-6


@pytest.mark.parametrize("fault", ["kill", "stop", "hang"])
@pytest.mark.parametrize(("stage", "rank"), STAGES)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_rank_ends_in_every_phase(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sharded: bool,
    stage: str,
    rank: int,
    fault: str,
) -> None:
    """The job fails as a death, no process is left, and the next try makes the same bits."""
    # In other phases than those in which the ranks compute, a hang is found by its limit.
    monkeypatch.setattr(trainer_process, "SHORTEST_LIMIT_SECONDS", 15.0)
    monkeypatch.setattr(trainer_process, "FIRST_PROGRESS_SECONDS", 60.0)
    monkeypatch.setattr(trainer_process, "TIMES_ITS_PACE", 1.0)
    config = TrainConfig(learning_rate=RATE)
    two = world.gang(2, is_sharded=is_sharded)
    two.train(world.start, tmp_path / "before", config, world.batches[:1])
    if stage == "load":
        two.end()
    two.break_next(rank, stage, fault)
    began = time.monotonic()
    with pytest.raises(TrainerDied):
        two.train(world.start, tmp_path / "broken", config, world.batches[:1])
    print(f"{stage} {rank} {fault} {is_sharded}: {time.monotonic() - began:.1f} s")
    assert set(two.gang.pids.values()) == {None}
    two.train(world.start, tmp_path / "after", config, world.batches[:1])
    files = [tmp_path / of / "1/adapter_model.safetensors" for of in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("qwen3"), stack)


@pytest.mark.parametrize("name", MADE_ALIKE)
def test_ranks_on_unlike_machines_are_one(qwen3: World, tmp_path: Path, name: str) -> None:
    check_made_alike(qwen3, tmp_path, name)


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_cannot_be_made_alike_train_nothing(qwen3: World, tmp_path: Path, name: str) -> None:
    check_refused(qwen3, tmp_path, name)
