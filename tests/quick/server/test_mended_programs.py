"""Programs that are started again after their job was refused, cancelled or failed: the real client and server, with simulated
engine and trainer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_server.jobs.trainer_process import TrainerDied, TrainerError
from tests.fakes.clock import FakeClock
from tests.quick.server.served import Served, sample_group, serving
from tests.refusals import refused
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path / "server", FakeClock()) as served:
        yield served


@pytest.fixture
async def model(served: Served, tmp_path: Path) -> AsyncIterator[art.TrainableModel]:
    async with art.Backend(served.url, reconnect_seconds=5) as backend:
        backend._log_dir = tmp_path / "program" / "logs"
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(backend)
        yield model


def start(model: art.TrainableModel, rollout_fn: Any, num_steps: int) -> Awaitable[None]:
    """A start of the program: all of its starts together train so many steps, of a group each."""
    backend: Any = model.backend()
    return art.PipelineTrainer(
        model, backend, rollout_fn, range(9), None, groups_per_step=1, max_steps=num_steps
    ).train()


async def mended(model: art.TrainableModel, number: int, config: None) -> art.TrajectoryGroup:
    return await sample_group(model)


async def broken(model: art.TrainableModel, number: int, config: None) -> art.TrajectoryGroup:
    """Has the message in place of the choice, the commonest mistake."""
    group = await sample_group(model)
    for trajectory in group:
        choice: Any = trajectory.messages_and_choices[-1]
        trajectory.messages_and_choices[-1] = choice.message.model_dump(exclude_none=True)
    return group


async def check_next_starts(model: art.TrainableModel, caplog: pytest.LogCaptureFixture) -> None:
    assert not given_up(caplog)
    await start(model, mended, 1)
    assert await model.get_step() == 1 and len(given_up(caplog)) == 1
    await start(model, mended, 2)
    assert await model.get_step() == 2 and not given_up(caplog)


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]
    caplog.clear()
    return lines


async def test_a_message_in_place_of_the_choice_is_mended(
    served: Served, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    with refused(art.ArtStatusError, "no_trainable_turn", "groups"):
        await start(model, broken, 1)
    await check_next_starts(model, caplog)
    assert len(served.trainer.tasks) == 2


async def test_a_pipeline_goes_on_after_a_cancelled_job(
    served: Served, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    served.trainer.events = [served.trainer.wait_to_be_cancelled]
    running = asyncio.ensure_future(start(model, mended, 1))
    await served.trainer.is_waiting.wait()
    async with httpx.AsyncClient(base_url=served.url) as client:
        (job,) = (await client.get("/api/jobs")).json()["jobs"]
        assert (await client.delete(f"/api/jobs/{job['job_id']}")).status_code == 200
    with refused(art.ArtJobError, "cancelled"):
        await running
    await check_next_starts(model, caplog)


async def test_a_pipeline_goes_on_after_a_job_that_failed_for_good(
    served: Served, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    served.trainer.events = [TrainerError("gap_too_large", "the log-probabilities differ")]
    with refused(art.ArtJobError, "gap_too_large"):
        await start(model, mended, 1)
    await check_next_starts(model, caplog)


async def test_a_killed_program_asks_for_its_job_again_and_trains_it_once(
    served: Served, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed while the job trains, and at the next start while it still does."""
    goes_on = asyncio.Event()

    async def wait(task: Any) -> None:
        await goes_on.wait()

    served.trainer.events = [wait]
    for _ in range(2):
        running = asyncio.ensure_future(start(model, mended, 1))
        await until(lambda: served.trainer.tasks)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    goes_on.set()
    await start(model, mended, 1)
    assert await model.get_step() == 1 and len(served.trainer.tasks) == 1 and not given_up(caplog)


async def test_a_job_whose_trainer_died_is_run_again_at_the_next_start_only_at_its_step(
    served: Served, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    served.trainer.events = [TrainerDied("killed")] * 6
    with refused(art.ArtJobError, "trainer_died"):
        await start(model, mended, 1)
    await start(model, mended, 1)
    assert await model.get_step() == 1 and len(served.trainer.tasks) == 7 and not given_up(caplog)
    served.trainer.events = [TrainerDied("killed")] * 6
    with refused(art.ArtJobError, "trainer_died"):
        await start(model, mended, 2)
    await model.train([await sample_group(model)])  # another program
    await start(model, mended, 3)
    assert await model.get_step() == 3
