"""The Python of the how-to pages runs as it stands, against a server that samples "maybe" and trains nothing.

Pages that need an engine are in `tests/engine/integration/test_howto.py`, the notebook is in `tests/long/docs`, the coding agents are in
`tests/long/coding_agents`, an annex's page is among its tests.
"""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import art
from tests.fakes.server import Answer, FakeArt
from tests.pages import PAGES, blocks, run
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

HERE = {
    "gap.md",
    "pipeline.md",
    "platforms.md",
    "rate-limits-and-failures.md",
    "resume.md",
    "share-a-server.md",
    "threads.md",
}
ELSEWHERE = {
    "agent-retries.md",
    "coding-agents.md",
    "from-others.md",
    "javascript.md",
    "not-learning.md",
    "sizing.md",
    "finetune-parts.md",
    "notebook.md",
    "read-rollouts.md",
    "serve-elsewhere.md",
    "distillation.md",
    "environments.md",
    "harbor.md",
    "sft.md",
}
QUESTION = "respond with yes, no, maybe"
TRAIN = "/api/models/{}/train"


def test_every_page_with_python_has_a_test() -> None:
    with_python = {page for page in PAGES if blocks(page, "python")}
    assert with_python == HERE | ELSEWHERE


# --- resume.md --------------------------------------------------------------------------------------------------------


async def start_program(file: Path, url: str, folder: Path | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        file,
        env=os.environ | {"ART_SERVER_URL": url},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_program_that_was_interrupted_makes_the_missing_steps(fake: FakeArt, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("resume.md", "python")[0])
    arrived = asyncio.Event()
    path = TRAIN.format("howto/resumed")

    def accept_and_go_away(request: Any) -> Answer:
        if fake.steps["howto/resumed"] == 0:
            return fake.train(request, "howto/resumed")
        arrived.set()
        return Answer(lines=[{"event": "accepted", "job_id": "j"}], hang_up=True)

    fake.on("POST", path, accept_and_go_away)
    fake.on("GET", "/api/jobs/j/events", Answer(503, {}))
    process = await start_program(program, fake.url)
    await arrived.wait()
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert output.decode().splitlines() == [
        "step 1: reward 1.0",
        "stopped; start the program again to continue",
    ]
    assert b"Traceback" not in errors

    fake.steps["howto/resumed"] += 1  # the accepted job was trained meanwhile
    del fake.routes["POST", path]
    process = await start_program(program, fake.url)
    output, errors = await process.communicate()
    assert output.decode().splitlines() == ["step 3: reward 1.0", "step 4: reward 1.0"], errors
    process = await start_program(program, fake.url)
    output, errors = await process.communicate()
    assert (output, process.returncode) == (b"", 0)


async def test_a_repeated_key_comes_with_the_same_groups(
    fake: FakeArt, model: art.TrainableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": model, "__name__": "page"}
    await run("resume.md", 0, names)
    fake.job_error = {"message": "the disk is full", "retryable": True}
    with pytest.raises(art.ArtJobError):
        await run("resume.md", 1, names)
    fake.job_error = None
    await run("resume.md", 1, names)
    first, second = fake.sent("POST", TRAIN.format("demo/agent"))
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert re.fullmatch("[0-9a-f]{64}", first.headers["idempotency-key"]), "the digest of the groups"
    assert first.body == second.body
    assert not (tmp_path / "groups.json").exists()


# --- gap.md -----------------------------------------------------------------------------------------------------------


async def test_the_gap_is_printed_and_a_refusal_is_answered(
    fake: FakeArt, model: art.TrainableModel, groups: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"art": art, "model": model, "groups": groups}
    await run("gap.md", 0, names)
    assert "loss/logprob_gap_mean 4e-07" in capsys.readouterr().out
    fake.job_error = {"message": "rounding explains at most 0.0004", "code": "gap_too_large"}
    await run("gap.md", 1, names)
    assert "rounding explains at most 0.0004" in capsys.readouterr().out
    fake.job_error = {"message": "another", "code": "non_finite"}
    with pytest.raises(art.ArtJobError):
        await run("gap.md", 1, names)


# --- share-a-server.md ------------------------------------------------------------------------------------------------


async def test_two_models_and_two_programs_share_a_server(
    fake: FakeArt, model: art.TrainableModel, groups: Any
) -> None:
    async def sample(sampled: art.TrainableModel) -> list[art.TrajectoryGroup]:
        if fake.steps["demo/agent"] == 198 and not moved:
            moved.append(True)
            fake.steps["demo/agent"] += 1  # the other program trains meanwhile
        return groups

    moved: list[bool] = []
    names: dict[str, Any] = {"art": art, "asyncio": asyncio, "sample": sample, "model": model}
    await run("share-a-server.md", 0, names, fake.url)
    assert fake.steps["alice/writer"] == fake.steps["alice/critic"] == 1
    keys = {request.headers.get("authorization") for request in fake.sent("POST", "/api/models")}
    assert "Bearer 8f1c0a6d" in keys

    fake.steps["demo/agent"] = 197
    await run("share-a-server.md", 1, names)
    expected = [request.json()["expected_step"] for request in fake.sent("POST", TRAIN.format("demo/agent"))]
    assert (expected, fake.steps["demo/agent"]) == ([197, 198, 199], 200)


# --- rate-limits-and-failures.md --------------------------------------------------------------------------------------


async def test_failures_of_rollouts_tools_and_trainings_are_survived(
    fake: FakeArt, model: art.TrainableModel, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    running: list[int] = [0, 0]

    async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
        started.append(question)
        number = len(started)
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.001)
        running[0] -= 1
        if number in (3, 7):
            raise ConnectionError("the tool is away")
        return art.Trajectory(reward=1.0)

    async def call_tool(query: str) -> str:
        started.append(query)
        if len(started) < 2:
            raise TimeoutError
        return "found"

    names: dict[str, Any] = {"art": art, "asyncio": asyncio, "model": model}
    names |= {"rollout": rollout, "call_tool": call_tool, "questions": ["one", "two", "three"]}
    page = "rate-limits-and-failures.md"
    await run(page, 0, names)
    assert "2 rollouts failed" in capsys.readouterr().out
    assert "ConnectionError: the tool is away" in names["failures"][0].traceback
    started.clear()
    await run(page, 1, names)
    assert await names["search"]("a") == "found" and started == ["a", "a"]
    running[1] = 0
    await run(page, 2, names)
    assert len(started) == 26 and running[1] == 16
    await run(page, 3, names)
    assert (await names["limited"](model, "four")).reward == 1.0
    fake.job_error = {"message": "the trainer died", "retryable": True}
    await run(page, 4, names)
    assert "True job j0 failed: the trainer died" in capsys.readouterr().out
    fake.job_error = {"message": "the loss is not finite"}
    with pytest.raises(art.ArtJobError):
        await run(page, 4, names)


async def test_a_request_is_repeated_after_a_429(fake: FakeArt, model: art.TrainableModel) -> None:
    def limit_once(request: Any) -> Answer:
        if len(fake.sent("POST", "/v1/chat/completions")) == 1:
            return Answer(429, {"error": {"message": "too many"}}, headers={"retry-after": "1"})
        return fake.otherwise(request)

    fake.on("POST", "/v1/chat/completions", limit_once)
    completion = (
        await model.openai_client()
        .with_options(timeout=60)
        .chat.completions.create(model=model.get_inference_name(), messages=[{"role": "user", "content": QUESTION}])
    )
    assert completion.choices[0].message.content == "maybe"
    assert len(fake.sent("POST", "/v1/chat/completions")) == 2


# --- threads.md -------------------------------------------------------------------------------------------------------


async def test_synchronous_agents_run_in_threads(
    fake: FakeArt, model: art.TrainableModel, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"model": model}
    page = "threads.md"
    await run(page, 0, names)
    trajectory = await names["rollout"](model, QUESTION)
    assert trajectory.reward == 1.0
    assert trajectory.messages()[-1]["content"] == "maybe"
    (path,) = [request.path for request in fake.requests if request.path.endswith("/chat/completions")]
    assert path.startswith("/s/")

    await run(page, 1, names)
    meeting = threading.Barrier(48, timeout=PATIENCE_SECONDS)  # more than the 32 threads of Python's own pool
    names["run_agent"] = lambda *_: f"maybe {meeting.wait()}"
    played = await asyncio.gather(*(names["rollout"](model, QUESTION) for _ in range(48)))
    assert len(played) == 48

    await run(page, 2, names)
    assert capsys.readouterr().out == "0\n"


# --- platforms.md -----------------------------------------------------------------------------------------------------


async def test_a_client_connects_through_a_tunnel(fake: FakeArt) -> None:
    model = art.TrainableModel(name="remote", project="demo", base_model="art/tiny")
    await run("platforms.md", 0, {"art": art, "model": model}, fake.url)
    assert json.loads(fake.sent("POST", "/api/models")[0].body)["name"] == "remote"


# --- pipeline.md ------------------------------------------------------------------------------------------------------


async def test_the_pipeline_makes_its_steps_once(fake: FakeArt, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("pipeline.md", "python")[0])
    for _ in range(2):
        process = await start_program(program, fake.url, tmp_path)
        output, errors = await process.communicate()
        assert output.decode() == "pipeline is at step 4\n", errors
    bodies = [request.json() for request in fake.sent("POST", TRAIN.format("howto/pipeline"))]
    assert [body["expected_step"] for body in bodies] == [0, 1, 2, 3]
    assert [len(body["groups"]) for body in bodies] == [4] * 4
    assert all(len(group["trajectories"]) == 8 for body in bodies for group in body["groups"])


async def test_a_submitted_job_is_awaited_after_sampling(
    fake: FakeArt, model: art.TrainableModel, groups: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def sample(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
        assert fake.sent("POST", TRAIN.format("demo/agent"))
        return groups

    await run("pipeline.md", 1, {"model": model, "groups": groups, "sample": sample})
    assert capsys.readouterr().out == "1 {}\n"
