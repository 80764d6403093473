"""PipelineTrainer against a server that keeps jobs by their keys and trains nothing."""

import asyncio
import itertools
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

import art
from art.pacing import Open
from art.pipeline_file import PipelineFile
from art_server.jobs.backoff import DIED
from tests.error_codes import Refusal, job_errors, refusals
from tests.fakes.server import Answer, FakeArt, Request
from tests.waiting import until

pytestmark = pytest.mark.anyio

MODEL = "demo/agent"
FILE = Path(".art", ".pipelines", "demo", "agent.sqlite")
FORMAT_1 = """
CREATE TABLE pipeline (id TEXT NOT NULL, first_step INTEGER NOT NULL, evaluated INTEGER, job INTEGER, job_config TEXT);
CREATE TABLE groups (number INTEGER PRIMARY KEY, began INTEGER NOT NULL, job INTEGER, body TEXT);
PRAGMA user_version = 1;
"""
"""The file of a pipeline at commit 72080d0."""


BROKEN = "what a broken program sampled"


class JobServer(FakeArt):
    """Each key is one job. Jobs end when `hold` is set, if there is one. What a broken program sampled is answered with
    `refusal`, or its job ends in `fault`, whenever it comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs_by_key: dict[str, tuple[bytes, str]] = {}
        """By key the body and the id of a job."""
        self.hold: asyncio.Event | None = None
        self.refusal: Refusal | None = None
        self.fault: dict[str, Any] | None = None

    def _answer(self, request: Request) -> Answer:
        answer = super()._answer(request)
        answer.after = self.hold if request.path.startswith("/api/jobs/") else None
        return answer

    def train(self, request: Request, model: str) -> Answer:
        key = request.headers["idempotency-key"]
        is_broken = BROKEN.encode() in request.body
        if is_broken and self.refusal is not None:
            detail = {"message": "no", "code": self.refusal.code, "retryable": self.refusal.is_retryable}
            return Answer(self.refusal.status, "a proxy's page" if self.refusal.code == "error" else {"error": detail})
        self.job_error = self.fault if is_broken else None
        if key not in self.jobs_by_key:
            answer = super().train(request, model)
            if answer.status != 200:
                return answer
            self.jobs_by_key[key] = request.body, f"j{len(self.ended) - 1}"
        body, job_id = self.jobs_by_key[key]
        assert body == request.body, "a server refuses a key with another body"
        return Answer(lines=[{"event": "accepted", "job_id": job_id}], hang_up=True)

    def numbers(self) -> list[list[int]]:
        """The scenarios of each job that made a step, in the order of the jobs."""
        done = [body for body, job_id in self.jobs_by_key.values() if self.ended[job_id]["event"] == "done"]
        bodies = [body.split(b"\n")[1:] for body in done]
        return [[json.loads(line)["metadata"]["number"] for line in lines] for lines in bodies]


@pytest.fixture
async def server() -> AsyncIterator[JobServer]:
    fake = JobServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def backend(server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[art.Backend]:
    monkeypatch.chdir(tmp_path)
    async with art.Backend(server.url, reconnect_seconds=5) as backend:
        yield backend


@pytest.fixture
async def model(backend: art.Backend) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(backend)
    return model


def group(number: int, *more: Any) -> art.TrajectoryGroup:
    message: Any = {"role": "user", "content": f"scenario {number}"}
    trajectories = [art.Trajectory(messages_and_choices=[message], reward=reward) for reward in (0.0, 1.0)]
    return art.TrajectoryGroup([*trajectories, *more], metadata={"number": number})


async def rollout(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
    return group(number)


def pipeline(model: art.TrainableModel, rollout_fn: Any, scenarios: Iterable[int], **more: Any) -> Any:
    more = {"groups_per_step": 2, **more}
    return art.PipelineTrainer(model, model.backend(), rollout_fn, scenarios, "the config", **more)  # type: ignore[arg-type]


async def test_scenarios_are_trained_once_and_in_their_order(server: JobServer, model: art.TrainableModel) -> None:
    seen: list[tuple[art.TrainableModel, int, Any]] = []

    async def watched(*arguments: Any) -> art.TrajectoryGroup:
        seen.append(arguments)
        return group(arguments[1])

    config = art.TrainConfig(learning_rate=1e-3, preset="dapo")
    await pipeline(model, watched, range(7), max_steps_off_policy=0, train_config=config).train()
    assert server.numbers() == [[0, 1], [2, 3], [4, 5], [6]]
    assert seen == [(model, number, "the config") for number in range(7)]
    body = server.sent("POST", f"/api/models/{MODEL}/train")[0].json()
    assert (body["expected_step"], body["config"]["learning_rate"], body["config"]["epsilon_high"]) == (0, 1e-3, 0.28)


@pytest.mark.parametrize(("bound", "expected"), [(0, 2), (1, 4), (3, 8)])
async def test_groups_are_sampled_while_a_step_trains_and_no_further_than_the_bound(
    server: JobServer, model: art.TrainableModel, bound: int, expected: int
) -> None:
    server.hold = asyncio.Event()
    begun: list[int] = []

    async def watched(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        begun.append(number)
        return group(number)

    training = asyncio.create_task(pipeline(model, watched, range(20), max_steps_off_policy=bound).train())
    await until(lambda: server.jobs_by_key and len(begun) >= expected)
    assert len(begun) == expected
    server.hold.set()
    await training
    assert begun == list(range(20))


async def test_max_concurrent_limits_what_is_sampled_at_a_time(model: art.TrainableModel) -> None:
    running, most = 0, 0

    async def watched(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return group(number)

    await pipeline(model, watched, range(20), max_steps_off_policy=4, max_concurrent=3).train()
    assert most == 3


async def test_max_steps_counts_the_steps_of_all_starts(server: JobServer, model: art.TrainableModel) -> None:
    server.steps[MODEL] = 5
    await pipeline(model, rollout, itertools.count(), max_steps_off_policy=0, max_steps=2).train()
    assert server.steps[MODEL] == 7
    await pipeline(model, rollout, itertools.count(), max_steps_off_policy=0, max_steps=2).train()
    assert server.steps[MODEL] == 7
    await pipeline(model, rollout, itertools.count(), max_steps_off_policy=0, max_steps=3).train()
    assert server.numbers() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_stopped_program_goes_on_where_it_was(
    server: JobServer, model: art.TrainableModel, is_accepted: bool
) -> None:
    """Stopped while a step trains, one group is finished, and one runs."""
    server.hold = asyncio.Event()
    sampled: list[int] = []
    goes_on = asyncio.Event()

    async def some(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        if number == 2:
            await goes_on.wait()
        if number == 3:
            await until(lambda: server.sent("POST", f"/api/models/{MODEL}/train"))
        sampled.append(number)
        return group(number)

    if not is_accepted:  # it hangs up, and the client asks again until it is stopped
        server.on("POST", f"/api/models/{MODEL}/train", Answer(hang_up=True))
    run = pipeline(model, some, range(6), max_steps=100)
    training = asyncio.create_task(run.train())
    await until(lambda: [group.number for group in getattr(run, "_finished", ())] == [3])
    await until(lambda: not is_accepted or server.jobs_by_key)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert sorted(sampled) == [0, 1, 3]
    server.routes.pop(("POST", f"/api/models/{MODEL}/train"), None)
    server.hold.set()
    goes_on.set()
    # Another configuration is for later steps.
    config = art.TrainConfig(learning_rate=1e-3)
    await pipeline(model, some, range(6), max_steps=100, train_config=config).train()
    assert server.numbers()[0] == [0, 1]
    assert sorted(itertools.chain(*server.numbers())) == list(range(6))
    assert sorted(sampled) == list(range(6))
    assert mode_of(FILE) == 0o600
    await pipeline(model, some, range(6), max_steps=100).train()
    assert len(server.jobs_by_key) == 3


async def test_a_model_that_another_program_trains_is_refused(server: JobServer, model: art.TrainableModel) -> None:
    async def other(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        if number == 4:
            server.steps[MODEL] += 1
        return group(number)

    with pytest.raises(
        art.ArtError, match=r"another program trains 'agent'.*next step is \d, and the model is at another"
    ):
        await pipeline(model, other, range(20)).train()
    done = server.numbers()
    await pipeline(model, rollout, range(20), max_steps_off_policy=3).train()
    assert server.numbers()[: len(done)] == done
    assert sorted(itertools.chain(*server.numbers())) == list(range(20)), "it goes on once the other program is stopped"


async def test_two_programs_of_one_pipeline(model: art.TrainableModel) -> None:
    async def second(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        with pytest.raises(art.ArtError, match="another program runs this pipeline"):
            await pipeline(model, rollout, range(2)).train()
        return group(number)

    await pipeline(model, second, range(2)).train()


async def test_groups_that_a_lower_bound_excludes_are_sampled_again(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    server.hold = asyncio.Event()
    sampled: list[int] = []

    async def watched(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        sampled.append(number)
        return group(number)

    run = pipeline(model, watched, range(8), max_steps_off_policy=3)
    training = asyncio.create_task(run.train())
    await until(lambda: server.jobs_by_key and len(run._finished) == 6)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    server.hold.set()
    await pipeline(model, watched, range(8), max_steps_off_policy=1).train()
    assert "max_steps_off_policy=1" in caplog.text and len(sampled) == 12
    assert sorted(itertools.chain(*server.numbers())) == list(range(8))


async def test_a_model_that_was_rolled_back_trains_what_was_undone_again(
    server: JobServer, model: art.TrainableModel
) -> None:
    await pipeline(model, rollout, range(20), max_steps_off_policy=0, max_steps=4).train()
    server.steps[MODEL] = 1
    server.jobs_by_key = dict(list(server.jobs_by_key.items())[:1])  # the server lets the keys of later steps go
    await pipeline(model, rollout, range(20), max_steps_off_policy=0, max_steps=4).train()
    assert server.numbers() == [[0, 1], [2, 3], [4, 5], [6, 7]]


async def test_a_few_failed_rollouts_are_reported_and_many_end_the_run(
    server: JobServer, model: art.TrainableModel
) -> None:
    async def some_fail(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        many = [art.Trajectory(reward=float(index)) for index in range(9)]
        return group(number, *many, *([LookupError("no city")] if number == 3 else []))

    await pipeline(model, some_fail, range(4), max_steps_off_policy=0).train()
    sent_groups = server.sent("POST", f"/api/models/{MODEL}/train")[1].json()["groups"]
    assert [len(sent_group["exceptions"]) for sent_group in sent_groups] == [0, 1]

    async def all_fail(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        raise LookupError("no town")

    with pytest.raises(art.ArtError, match=r"(?s)last 2 groups failed.*no town"):
        await pipeline(model, all_fail, range(8)).train()
    assert len(server.jobs_by_key) == 2
    await pipeline(model, rollout, range(8)).train()
    assert sorted(itertools.chain(*server.numbers())) == list(range(8)), "what failed was sampled again"


async def test_a_group_that_no_job_can_contain_is_an_error_of_its_field(
    server: JobServer, model: art.TrainableModel
) -> None:
    async def spoiled(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        return group(number, art.Trajectory(reward=float("nan")))

    with pytest.raises(ValueError, match="reward"):
        await pipeline(model, spoiled, range(2)).train()

    async def empty(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        return art.TrajectoryGroup([])

    with pytest.raises(ValueError, match="neither a trajectory"):
        await pipeline(model, empty, range(2)).train()
    assert not server.jobs_by_key


async def broken(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
    sampled = group(number)
    for trajectory in sampled:
        trajectory.metadata["text"] = BROKEN
    return sampled


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


async def end_with_an_error(run: Any, kind: type[Exception] = art.ArtError) -> None:
    """Trains until the error of a broken program, when other finished groups wait in its file."""
    with pytest.raises(kind):
        await run.train()


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of groups that are given up, since the last look."""
    lines = [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]
    caplog.clear()
    return lines


async def check_that_a_mended_program_trains(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture, **broken_arguments: Any
) -> None:
    """Its second start trains, and says once what was given up; its third goes on. The server asserts that a key has one body."""
    one = {"groups_per_step": 1}
    await end_with_an_error(pipeline(model, broken, range(2), **one, **broken_arguments), Exception)
    assert not server.numbers() and not given_up(caplog)
    await pipeline(model, rollout, range(2), **one).train()
    assert sorted(server.numbers()) == [[0], [1]]
    (line,) = given_up(caplog)
    assert "sampled again" in line
    await pipeline(model, rollout, range(3), **one).train()
    assert sorted(server.numbers()) == [[0], [1], [2]] and not given_up(caplog)


@pytest.mark.parametrize(
    "refusal",
    [refusal for refusal in refusals() if not refusal.is_retryable and refusal.code != "step_moved"],
    ids=lambda refusal: f"{refusal.status}-{refusal.code}",
)
async def test_a_mended_program_trains_after_each_refusal(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture, refusal: Refusal
) -> None:
    """step_moved is no fault of the groups: `test_a_model_that_another_program_trains_is_refused`."""
    server.refusal = refusal
    await check_that_a_mended_program_trains(server, model, caplog)


@pytest.mark.parametrize(("code", "is_retryable"), [*((code, False) for code in job_errors()), (DIED, True)])
async def test_a_mended_program_trains_after_each_failure_of_a_job(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture, code: str, is_retryable: bool
) -> None:
    server.fault = {"message": f"because of {code}", "code": code, "retryable": is_retryable}
    await check_that_a_mended_program_trains(server, model, caplog)


async def test_a_mended_program_trains_after_a_configuration_that_no_request_can_have(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    config = art.TrainConfig(learning_rate=[1e-3], passes=2)
    await check_that_a_mended_program_trains(server, model, caplog, train_config=config)


@pytest.mark.parametrize(
    "refusal",
    [refusal for refusal in refusals() if refusal.is_retryable],
    ids=lambda refusal: f"{refusal.status}-{refusal.code}",
)
async def test_nothing_is_given_up_that_waiting_helps(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture, refusal: Refusal
) -> None:
    server.refusal = refusal
    async with art.Backend(server.url, reconnect_seconds=0) as impatient:
        await model.register(impatient)
        for _ in range(2):
            await end_with_an_error(pipeline(model, broken, range(2)), art.ArtStatusError)
        server.refusal = None
        await pipeline(model, rollout, range(2)).train()
    assert server.numbers() == [[0, 1]] and not given_up(caplog)
    (body, _) = next(iter(server.jobs_by_key.values()))
    assert BROKEN.encode() in body, "the stored groups"


async def test_a_server_that_was_mended_trains_what_it_refused(server: JobServer, model: art.TrainableModel) -> None:
    """Started again with a larger --max-body-mb, say."""
    server.refusal = Refusal(413, "body_too_large", False)
    await end_with_an_error(pipeline(model, broken, range(2)))
    server.refusal = None
    await pipeline(model, rollout, range(2)).train()
    (body, _) = next(iter(server.jobs_by_key.values()))
    assert server.numbers() == [[0, 1]] and BROKEN.encode() in body


async def test_the_file_of_an_earlier_version_ends_its_job_under_its_key(
    server: JobServer, model: art.TrainableModel
) -> None:
    FILE.parent.mkdir(parents=True)
    database = sqlite3.connect(FILE)
    database.executescript(FORMAT_1)
    database.execute("INSERT INTO pipeline VALUES ('earlier', 0, NULL, 0, '{}')")
    bodies = [(number, 0, 0, group(number).model_dump_json(warnings=False)) for number in (0, 1)]
    database.executemany("INSERT INTO groups VALUES (?, ?, ?, ?)", bodies)
    database.commit()
    database.close()
    await pipeline(model, rollout, range(4)).train()
    assert server.numbers() == [[0, 1], [2, 3]]
    assert next(iter(server.jobs_by_key)) == "earlier-0"


async def test_evaluations_sample_their_step_while_training_goes_on(
    server: JobServer, model: art.TrainableModel
) -> None:
    evaluated: list[tuple[str, int, Any]] = []

    async def evaluate(model: art.TrainableModel, step: int, config: Any) -> Any:
        evaluated.append((model.get_inference_name(), step, config))
        trajectory = art.Trajectory(reward=1.0)
        return [trajectory] if step else {"val": [art.TrajectoryGroup([trajectory])], "test": [trajectory]}

    arguments = {"eval_fn": evaluate, "eval_every_n_steps": 2}
    await pipeline(model, rollout, range(10), max_steps=3, **arguments).train()
    await pipeline(model, rollout, range(10), max_steps=5, **arguments).train()
    assert evaluated == [(f"{MODEL}@{step}", step, "the config") for step in (0, 2, 4)]
    logged = [request.json() for request in server.sent("POST", f"/api/models/{MODEL}/log")]
    assert [(body["step"], body["split"]) for body in logged] == [(0, "val"), (0, "test"), (2, "val"), (4, "val")]


async def test_a_step_that_was_deleted_before_its_evaluation_is_left_out(
    server: JobServer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated: list[int] = []

    async def evaluate(model: art.TrainableModel, step: int, config: Any) -> Any:
        if step == 2:
            await until(lambda: server.steps[MODEL] == 6)
            raise LookupError("stopped")
        evaluated.append(step)
        return [art.Trajectory(reward=1.0)]

    arguments = {"eval_fn": evaluate, "eval_every_n_steps": 2}
    with pytest.raises(LookupError, match="stopped"):
        await pipeline(model, rollout, range(20), max_steps=6, **arguments).train()
    server.deleted.add(2)  # by the server's --keep-last, or by the program
    await pipeline(model, rollout, range(20), max_steps=6, **arguments).train()
    assert evaluated == [0, 4, 6] and "step 2 is not evaluated" in caplog.text


async def test_a_failed_evaluation_ends_the_run(model: art.TrainableModel) -> None:
    async def evaluate(model: art.TrainableModel, step: int, config: Any) -> Any:
        raise LookupError("no judge")

    with pytest.raises(LookupError, match="no judge"):
        await pipeline(model, rollout, range(10), eval_fn=evaluate).train()


async def test_an_evaluation_that_exits_does_not_end_the_program(model: art.TrainableModel) -> None:
    async def evaluate(model: art.TrainableModel, step: int, config: Any) -> Any:
        sys.exit(0)

    with pytest.raises(RuntimeError, match=r"eval_fn ended with SystemExit\(0\)"):
        await pipeline(model, rollout, range(10), eval_fn=evaluate).train()


async def test_rollouts_that_exit_are_failed_rollouts_of_the_pipeline(model: art.TrainableModel) -> None:
    async def exits(model: art.TrainableModel, number: int, config: Any) -> art.TrajectoryGroup:
        sys.exit(0)

    with pytest.raises(art.ArtError, match=r"SystemExit\(0\)"):
        await pipeline(model, exits, range(10)).train()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"max_steps_off_policy": -1}, ValueError, "max_steps_off_policy must be at least 0, not -1"),
        ({"groups_per_step": 0}, ValueError, "groups_per_step must be at least 1, not 0"),
        ({"max_concurrent": 0}, ValueError, "max_concurrent must be at least 1, not 0"),
        ({"max_steps": -1}, ValueError, "max_steps must be at least 0, not -1"),
        ({"learning_rate": 1e-5}, TypeError, r"train_config=art\.TrainConfig"),
        ({"num_rollout_workers": 4}, TypeError, "it is max_concurrent here"),
        ({"resume": False}, TypeError, "a model of another name begins anew"),
        ({"grups": 1}, TypeError, r"grups \(no such argument\)"),
    ],
)
async def test_bad_arguments_are_one_sentence(
    model: art.TrainableModel, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        pipeline(model, rollout, range(2), **arguments)


async def test_scenarios_and_backend_are_checked_at_once(server: JobServer, model: art.TrainableModel) -> None:
    async def scenarios() -> AsyncIterator[int]:
        yield 0

    with pytest.raises(TypeError, match="async_generator, not an iterable"):
        pipeline(model, rollout, scenarios())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another backend"):
        art.PipelineTrainer(model, art.Backend(server.url), rollout, range(2), None, groups_per_step=1)


def test_a_damaged_file_and_one_of_another_version_are_named(tmp_path: Path) -> None:
    file = tmp_path / "agent.sqlite"
    file.write_bytes(b"no database " * 100)
    with pytest.raises(art.ArtError, match="delete it"):
        PipelineFile(file, 0)
    file.unlink()
    pipeline_file = PipelineFile(file, 0)
    pipeline_file.add(Open(0, 7), "{}")
    pipeline_file._db.execute("PRAGMA user_version = 99")
    pipeline_file.close()
    with pytest.raises(art.ArtError, match="another version of art"):
        PipelineFile(file, 0)
