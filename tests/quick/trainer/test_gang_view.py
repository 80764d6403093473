"""Several ranks compute what one does, and one that fails takes nothing with it. Real processes, which few tests share."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from art_protocol.wire import TrainConfig
from art_server.jobs import gang as server_side
from art_server.jobs.budgets import Budgets
from art_server.jobs.trainer_process import TrainerError, TrainerProcess
from art_server.process.place import Here
from art_server.shared.trainer_messages import Batch, LoadTask, WorkerConfig
from art_server.trainer.gang_view import GangView
from art_server.trainer.policy import Policy
from tests.fakes.places import Elsewhere
from tests.makers.teacher_tops import with_targets
from tests.ranks import BUDGET, RATE, World, difference, running
from tests.unlike_ranks import check_made_alike, check_refused

SEVERAL = {
    "KL in the reward and entropy": TrainConfig(beta=0.2, kl_in="reward", entropy_bonus=0.1),
    "mini-batches": TrainConfig(preset="gspo", passes=2, mini_batches=2, beta=0.1),
    "demonstrations": TrainConfig(objective="likelihood"),
    "a teacher": TrainConfig(distill_alpha=0.3),
}
"""All that the ranks exchange: a penalty that decides the plan; log-probabilities of the start, of the reference, and of
trajectories over several micro-batches; gradients and the numbers of tokens. `tests/long/trainer/test_gang_view.py` has every loss."""
NOT_COMPARED = ("time/", "throughput/", "data/step_peak_memory")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack)


@pytest.fixture(autouse=True)
def usual_budgets(world: World) -> Iterator[None]:
    yield
    world.forget_budgets()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 5), st.booleans())
def test_each_micro_batch_has_one_rank(loads: list[int], size: int, is_sharded: bool) -> None:
    shares = [GangView(rank, size, is_sharded=is_sharded).rounds(loads) for rank in range(size)]
    counted = [index for share in shares for index, counts in share if counts]
    assert sorted(counted) == list(range(len(loads)))
    tokens = [sum(loads[index] for index, counts in share if counts) for share in shares]
    assert max(tokens) - min(tokens) <= max(loads)
    if is_sharded:
        assert len({len(share) for share in shares}) == 1, "each rank makes as many passes"


@pytest.mark.parametrize("name", list(SEVERAL))
def test_two_ranks_are_one(world: World, tmp_path: Path, name: str) -> None:
    """Gradient and weights of two jobs, whole and sharded."""
    config = SEVERAL[name].model_copy(update={"learning_rate": RATE})
    batches = world.batches[:2]
    if name == "a teacher":
        batches = [with_targets(batch, 128, seed) for seed, batch in enumerate(batches)]
    one = world.gang(1).train(world.start, tmp_path / "one", config, batches)
    for gang in (world.gang(2), world.gang(2, is_sharded=True)):
        out = tmp_path / gang.folder.name
        several = gang.train(world.start, out, config, batches)
        # The first moments after one step are the clipped gradient, times a tenth.
        assert difference(tmp_path / "one/1/optimizer.safetensors", out / "1/optimizer.safetensors") < 1e-6
        assert difference(tmp_path / "one/2/adapter_model.safetensors", out / "2/adapter_model.safetensors") < 1e-6
        assert sorted(os.listdir(out / "2")) == sorted(os.listdir(tmp_path / "one/2"))
        for ours, theirs in zip(several, one, strict=True):
            assert ours.environment["ranks"] == "2"
            assert ours.optimizer_steps == theirs.optimizer_steps
            for metric, value in theirs.metrics.items():
                if not metric.startswith(NOT_COMPARED):
                    assert ours.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


def test_the_same_ranks_give_the_same_bits_and_others_continue(world: World, tmp_path: Path) -> None:
    config = TrainConfig(learning_rate=RATE)
    two, one = world.gang(2), world.gang(1)
    for out in ("first", "again"):
        two.train(world.start, tmp_path / out, config, world.batches[:1])
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "first/1" / file).read_bytes() == (tmp_path / "again/1" / file).read_bytes()
    one.train(tmp_path / "first/1", tmp_path / "by one", config, world.batches[1:2])
    two.train(tmp_path / "first/1", tmp_path / "by two", config, world.batches[1:2])
    adapters = [tmp_path / by / "1/adapter_model.safetensors" for by in ("by one", "by two")]
    assert difference(*adapters) < 1e-6


def test_a_rank_without_a_tree_waits(world: World, tmp_path: Path) -> None:
    few = Batch(groups=world.batches[0].groups[-1:], distributions=world.batches[0].distributions)
    config = TrainConfig(learning_rate=RATE, preset="gspo")
    (one,) = world.gang(1).train(world.start, tmp_path / "one", config, [few], budget_divisor=1)
    assert one.metrics["data/step_num_micro_batches"] == 1
    for gang in (world.gang(2), world.gang(2, is_sharded=True)):
        out = tmp_path / gang.folder.name
        gang.train(world.start, out, config, [few])
        adapters = [folder / "1/adapter_model.safetensors" for folder in (tmp_path / "one", out)]
        assert difference(*adapters) < 1e-6


def test_all_ranks_try_again_with_less_when_one_has_no_memory(world: World, tmp_path: Path) -> None:
    config = TrainConfig(learning_rate=RATE)
    two = world.gang(2)
    two.break_next(1, "forward", "fill_memory")
    (done,) = two.train(world.start, tmp_path / "two", config, world.batches[:1])
    assert done.environment["max_tokens_at_end"] == str(BUDGET // 2)
    assert done.metrics["data/step_num_out_of_memory_retries"] == 1
    world.gang(1).train(world.start, tmp_path / "one", config, world.batches[:1])
    adapters = [tmp_path / of / "1/adapter_model.safetensors" for of in ("one", "two")]
    assert difference(*adapters) < 1e-6


@pytest.fixture(scope="module")
def by_two(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of the first job, by two ranks of which none fails."""
    folder = tmp_path_factory.mktemp("by_two")
    world.gang(2).train(world.start, folder, TrainConfig(learning_rate=RATE), world.batches[:1])
    return folder / "1/adapter_model.safetensors"


@pytest.mark.parametrize(("fault", "code"), [("cancel", "cancelled"), ("spoil", "non_finite")])
def test_what_ends_a_job_on_one_rank_ends_it_on_all_and_no_process(
    world: World, tmp_path: Path, by_two: Path, fault: str, code: str
) -> None:
    config = TrainConfig(learning_rate=RATE)
    two = world.gang(2)
    two.break_next(1, "forward", fault)
    with pytest.raises(TrainerError) as caught:
        two.train(world.start, tmp_path / "broken", config, world.batches[:1])
    assert caught.value.code == code
    pids = two.gang.pids
    two.train(world.start, tmp_path / "after", config, world.batches[:1])
    assert two.gang.pids == pids and None not in pids.values(), "all of them trained the next job"
    assert not list((tmp_path / "broken").glob("*/optimizer.safetensors"))
    assert (tmp_path / "after/1/adapter_model.safetensors").read_bytes() == by_two.read_bytes()


@pytest.mark.parametrize(
    ("is_sharded", "rank", "stage", "fault", "code"),
    [
        (False, 1, "reduce", "kill", "trainer_died"),
        (False, 0, "save", "fill_disk", "no_disk_space"),
        (False, 0, "reduce", "fill_memory", "out_of_memory"),
        (True, 1, "forward", "fill_memory", "out_of_memory"),
    ],
)
def test_a_rank_that_fails_alone_ends_the_others_and_the_next_job_starts_them(
    world: World, tmp_path: Path, by_two: Path, is_sharded: bool, rank: int, stage: str, fault: str, code: str
) -> None:
    """`tests/long/trainer/test_gang_view.py` has ranks that are killed, stopped or hang in every phase."""
    config = TrainConfig(learning_rate=RATE)
    two = world.gang(2, is_sharded=is_sharded)
    two.break_next(rank, stage, fault)
    with pytest.raises(TrainerError) as caught:
        two.train(world.start, tmp_path / "broken", config, world.batches[:1])
    assert caught.value.code == code
    assert set(two.gang.pids.values()) == {None}
    two.train(world.start, tmp_path / "after", config, world.batches[:1])
    adapter = tmp_path / "after/1/adapter_model.safetensors"
    assert difference(by_two, adapter) < (1e-6 if fault == "fill_memory" else 1e-12)


def test_a_shard_is_half_of_the_layers(world: World, tmp_path: Path) -> None:
    """The bytes of the layers' weights, which each rank writes into its log at the start."""
    two = world.gang(2, is_sharded=True)
    two.train(world.start, tmp_path, TrainConfig(learning_rate=RATE), world.batches[:1])
    weights = load_file(next(world.base.glob("*.safetensors")))
    whole = sum(tensor.nbytes for name, tensor in weights.items() if ".layers." in name)
    for rank in range(2):
        log = (two.folder / ("trainer.log" if rank == 0 else f"trainer-{rank}.log")).read_text()
        assert f"{whole // 2} of {whole} bytes of the layers" in log


@pytest.mark.parametrize("name", ["numbers", "trees that one card cannot compile"])
def test_ranks_on_unlike_machines_are_one(world: World, tmp_path: Path, name: str) -> None:
    check_made_alike(world, tmp_path, name)


def test_a_check_that_fails_on_one_rank_fails_on_all(world: World, tmp_path: Path) -> None:
    """A reduced maximum may lose what is not a number."""
    code = """
from art_server.trainer import checking
if is_last: checking._gap = lambda *_: float("nan")
"""
    gang = running(world.base, tmp_path / "two", 2, {}, code, max_tokens_per_micro_batch=BUDGET)
    with gang as two, pytest.raises(TrainerError) as caught:
        two.train(world.start, tmp_path / "out", TrainConfig(learning_rate=RATE), world.batches[:1])
    assert caught.value.code == "trainer_error" and "differ by inf" in caught.value.message
    assert not list((tmp_path / "out").glob("*/*.safetensors"))


def test_what_one_job_learned_of_memory_all_ranks_of_the_next_know(world: World, tmp_path: Path) -> None:
    """The server keeps it: whichever machine has the first rank, and whichever ran out of memory."""
    config = TrainConfig(learning_rate=RATE)
    world.gang(1).train(world.start, tmp_path / "one", config, world.batches[:2])
    with running(world.base, tmp_path / "two", 2, max_tokens_per_micro_batch=BUDGET) as two:
        two.break_next(1, "forward", "fill_memory")
        first, second = two.train(world.start, tmp_path / "out", config, world.batches[:2])
        two.break_next(0, "join", "fill_memory")
        (third,) = two.train(tmp_path / "out/1", tmp_path / "again", config, world.batches[1:2])
        learned = Budgets(two.folder / "budgets.json").read()
    assert first.environment["max_tokens_at_end"] == second.environment["max_tokens"] == str(BUDGET // 2)
    assert {*learned.values()} == {BUDGET // 4} and third.environment["max_tokens_at_end"] == str(BUDGET // 4)
    assert all(str(world.base) in key for key in learned)
    for step, out in (("1", "out/1"), ("2", "out/2"), ("2", "again/1")):
        states = [folder / "optimizer.safetensors" for folder in (tmp_path / "one" / step, tmp_path / out)]
        assert difference(*states) < 1e-6, out


@pytest.mark.parametrize("name", ["number type", "plan"])
def test_ranks_that_cannot_be_made_alike_train_nothing(world: World, tmp_path: Path, name: str) -> None:
    check_refused(world, tmp_path, name)


def test_a_gang_of_a_cpu_and_a_gpu_is_refused_before_it_starts(tmp_path: Path) -> None:
    gang = server_side.Gang(log_dir=tmp_path, locations=[Here(device="cpu")], cache_dir=tmp_path)
    gang.use(WorkerConfig(base_model="base", device="cpu"))
    location = Elsewhere("host b", "cuda")
    gang.add([TrainerProcess(location=location, log_path=tmp_path / "log", cache_dir=tmp_path)])
    with pytest.raises(TrainerError) as caught:
        asyncio.run(gang.run(LoadTask()))
    error = caught.value
    assert (error.code, error.retryable) == ("unlike_ranks", True)
    assert "this machine" in error.message and "host b" in error.message and "--ranks 0" in error.message


def test_a_policy_alone_has_no_ranks(policy: Policy) -> None:
    assert policy.gang.size == 1 and policy.gang.is_first
    assert policy.gang.rounds([5, 7]) == [(0, True), (1, True)]
