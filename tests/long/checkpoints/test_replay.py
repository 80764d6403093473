"""Steps are made again from their records: bit-equal, or with the input that differs."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import pytest

from art_protocol.wire import JobReport, LoRAConfig, TrainConfig
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.pause_gate import PauseGate
from art_server.errors import NotFound
from art_server.jobs import replay_record
from art_server.jobs.budgets import Budgets
from art_server.jobs.gang import Gang
from art_server.jobs.job_row import Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.replay_record import FOLDER, ReplayRecord
from art_server.jobs.runner import JobRunner
from art_server.process.background import Background
from art_server.process.place import Here
from art_server.shared.main_memory import main_memory
from art_server.shared.trainer_messages import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    WorkerConfig,
)
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord
from art_server.store.registry import Registry
from art_server.trainer.token_budget import budget_key
from scripts import replay
from tests.fakes.parts import FakeEngine, keep_all
from tests.makers.first_steps import write_first_checkpoint
from tests.waiting import PATIENCE_SECONDS

LORA = LoRAConfig(rank=4, target_modules=["q_proj", "v_proj"])


def make_batch(seed: int) -> Batch:
    rng = random.Random(seed)

    def trajectory() -> TrainableTrajectory:
        tokens = [rng.randrange(20, 400) for _ in range(24)]
        logprobs = [None] * 8 + [-rng.uniform(1.0, 6.0) for _ in range(16)]
        sequence = TokenSequence(token_ids=tokens, logprobs=logprobs)
        return TrainableTrajectory(reward=rng.random(), sequences=[sequence])

    groups = [TrainableGroup(trajectories=[trajectory() for _ in range(4)]) for _ in range(4)]
    return Batch(groups=groups)


async def train_two_steps(path: Path) -> ModelFolder:
    """Two jobs, through the real queue, runner and trainer."""
    registry, engine = Registry(path), FakeEngine()
    queue = JobQueue(registry.database)
    engine.base = BaseModel("art/tiny", TINY_DIR)
    # The budget of an earlier job, and a plan's factor: without them the steps are split and added otherwise.
    budgets = Budgets(path / "budgets.json")
    budgets.learn(budget_key("CPU", main_memory(), str(TINY_DIR), LORA.rank, 24), 16)
    config = WorkerConfig(
        base_model=str(TINY_DIR),
        trainer="peft",
        dtype="float32",
        threads=2,
        checkpointing_factor=1.5,
    )
    trainer = Gang(log_dir=path, locations=[Here(device="cpu")], cache_dir=path, budgets=budgets)
    trainer.use(config)
    folder = registry.folder("p", "a")
    first = folder.new_checkpoint_dir()
    write_first_checkpoint(str(TINY_DIR), LORA, 0, first)
    folder.commit_checkpoint(first, CheckpointRecord(step=0))
    record = ModelRecord(name="a", project="p", base_model="art/tiny", lora=LORA)
    folder.create(record, path / "engine.log")
    model = registry.add(folder, record)
    runner = JobRunner(
        queue=queue,
        registry=registry,
        fleet=engine,  # type: ignore[arg-type]
        gate=PauseGate(),
        trainer=trainer,
        owner=DeviceOwner(),
        retain=keep_all,
    )
    background = Background()
    background.start("job runner", runner.run_forever)
    # Two mini-batches in an order that depends on the seed, so the optimizer state matters, too.
    config = TrainConfig(learning_rate=1e-3, passes=2, mini_batches=2)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for number in range(2):
                payload = Payload.make(make_batch(number))
                job = queue.insert(model.number, None, "digest", config, payload, JobReport())
                while queue.get(job.job_id).state != "done":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    finally:
        await background.stop()
        await trainer.stop()
        registry.database.close()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return asyncio.run(train_two_steps(tmp_path_factory.mktemp("replay")))


@pytest.fixture
def record(trained: ModelFolder, tmp_path: Path) -> Path:
    """A copy of the second step's record, away from its server: a record needs nothing else."""
    return shutil.copytree(trained.checkpoint_dir(2) / FOLDER, tmp_path / "copy")


def run(record: Path | str, path: Path = Path(".art")) -> int:
    """Runs the script; returns its status."""
    return replay.main([str(record), "--path", str(path)])


def test_a_replayed_step_is_bit_equal(trained: ModelFolder, record: Path) -> None:
    start = trained.checkpoint_dir(1) / "adapter_model.safetensors"
    linked = trained.checkpoint_dir(2) / FOLDER / "start" / start.name
    assert linked.samefile(start), "the start takes no room of its own"
    assert run(record) == 0


def test_a_replay_has_the_token_budget_of_its_step(record: Path, tmp_path: Path) -> None:
    described = ReplayRecord.model_validate_json((record / "record.json").read_bytes())
    names = "max_tokens", "max_tokens_at_end", "checkpointing", "checkpointing_factor"
    assert [described.environment[name] for name in names] == ["16", "16", "True", "1.5"]
    (tmp_path / "again").mkdir()
    done = asyncio.run(replay.train(record, described, TINY_DIR, tmp_path / "again"))
    assert done.environment == described.environment


def test_the_script_finds_a_step_in_a_servers_folder(trained: ModelFolder, capsys: pytest.CaptureFixture[str]) -> None:
    root = trained.path.parents[2]
    assert run("a@1", root) == 0
    assert capsys.readouterr().out == "p/a, step 1: bit-equal (adapter and optimizer state)\n"
    with pytest.raises(NotFound) as error:
        replay.find_record("p/a@0", root)
    assert error.value.code == "unknown_step"
    assert run("p/a@0", root) == 2


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()  # it may be a link to the checkpoint's own file
    file.write_bytes(data)


def edit(record: Path, name: str, value: str) -> None:
    file = record / "record.json"
    described = json.loads(file.read_text())
    described["environment"][name] = value
    file.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("batch.json.zlib", "batch.json.zlib: changed"),
        ("start/adapter_model.safetensors", "start/adapter_model.safetensors: changed"),
        ("start/optimizer.safetensors", "start/optimizer.safetensors: changed"),
    ],
)
def test_a_changed_input_is_named(file: str, said: str, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(record / file)
    assert run(record) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "p/a, step 2 cannot be made again: these inputs differ from the record",
        f"  {said}",
    ]


def test_another_base_model_is_named(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = shutil.copytree(TINY_DIR, tmp_path / "base")
    spoil(base / "model.safetensors")
    file = record / "record.json"
    file.write_text(file.read_text().replace('"art/tiny"', json.dumps(str(base))))
    assert run(record) == 1
    assert "model.safetensors: changed" in capsys.readouterr().out


def test_another_environment_is_named(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is compared first: another version that computes the same is no difference."""
    edit(record, "torch", "0.0.1")
    assert run(record) == 0
    edit(record, "dtype", "bfloat16")
    edit(record, "max_tokens_at_end", "8")  # memory ran out
    assert run(record) == 1
    out = capsys.readouterr().out
    assert "not equal" in out and "torch is" in out and "the record has 0.0.1" in out
    assert "max_tokens_at_end is 16; the record has 8" in out


def test_only_the_newest_steps_have_a_record(trained: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_record, "RECORDS_KEPT", 1)
    newest = trained.checkpoint_dir(2) / FOLDER
    described = replay_record.ReplayRecord.model_validate_json((newest / "record.json").read_bytes())
    packed = (newest / "batch.json.zlib").read_bytes()
    shutil.rmtree(newest)
    replay_record.write_record(trained, described, packed)
    assert newest.exists() and not (trained.checkpoint_dir(1) / FOLDER).exists()
