"""What a new program gets wrong, and the sentence that says what to write instead."""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
from art.backend import Backend
from tests.quick.client.conftest import Answer, FakeServer
from tests.quick.client.demonstrations import TRAIN

pytestmark = pytest.mark.anyio


async def rollout() -> art.Trajectory:
    return art.Trajectory(reward=1.0)


async def gather() -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups([art.TrajectoryGroup(rollout() for _ in range(2))])


@pytest.mark.parametrize(
    ("make_groups", "said"),
    [
        (gather, "await"),
        (lambda: art.TrajectoryGroup([art.Trajectory()]), r"\[group\]"),
        (lambda: art.TrajectoryGroup([rollout()]), r"\[group\]"),
        (lambda: [art.Trajectory()], r"groups\[0\] is Trajectory.*art.TrajectoryGroup\(trajectories\)"),
    ],
)
async def test_what_is_no_list_of_groups_is_named(
    model: art.TrainableModel, make_groups: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        await model.train(make_groups())
    with pytest.raises(TypeError, match=said):
        await model.backend().train(model, make_groups())  # type: ignore[attr-defined]


async def test_one_group_is_no_list_to_gather() -> None:
    with pytest.raises(TypeError, match=r"\[group\]"):
        await art.gather_trajectory_groups(art.TrajectoryGroup(rollout() for _ in range(2)))  # type: ignore[arg-type]


def test_copies_are_no_group() -> None:
    with pytest.raises(ValueError, match=r"8 times.*run the rollout once for each"):
        art.TrajectoryGroup([art.Trajectory()] * 8)
    with pytest.raises(ValueError, match="8 times"):
        art.TrajectoryGroup([rollout()] * 8)


async def test_one_rollout_is_no_group() -> None:
    for one in (rollout(), art.Trajectory()):
        with pytest.raises(TypeError, match=r"write `art.TrajectoryGroup\(rollout\(...\) for _ in range\(8\)\)`"):
            art.TrajectoryGroup(one)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reward": None}, "Trajectory: reward is None: it must be a number"),
        ({"metrics": {"right": "high"}}, "Trajectory: metrics['right'] is 'high': it must be a number"),
        ({"metrics": 5}, "Trajectory: metrics is 5: it must be a dictionary"),
        ({"messages_and_choices": None}, "Trajectory: messages_and_choices is None: it must be a list"),
        ({"rewrd": 1.0}, "Trajectory has no field 'rewrd': did you mean 'reward'?"),
    ],
)
def test_a_wrong_field_of_a_trajectory_is_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refused:
        art.Trajectory(**fields)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "TrainableModel: project is missing: pass project=..., a text"),
        ({"project": 5}, "TrainableModel: project is 5: it must be a text"),
        ({"project": "p", "base_modell": "b"}, "TrainableModel has no field 'base_modell': did you mean 'base_model'?"),
        ({"project": "a b"}, "TrainableModel: project 'a b' becomes a folder: .*letters"),
    ],
)
def test_a_wrong_field_of_a_model_is_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}[^\n]*$"):
        art.TrainableModel(**{"name": "a", "base_model": "b", **fields})


async def test_what_is_no_backend_is_answered_with_the_call(model: art.TrainableModel) -> None:
    address: Any = "http://gpu-box:7623"
    with pytest.raises(TypeError, match=r"write `art.Backend\('http://gpu-box:7623'\)`"):
        await model.register(address)
    kind: Any = art.LocalBackend
    with pytest.raises(TypeError, match=r"write LocalBackend\(\)"):
        await model.register(kind)


@pytest.mark.parametrize("step", ["best", -1, None])
async def test_what_is_no_step_cannot_be_gone_back_to(model: art.TrainableModel, step: Any) -> None:
    with pytest.raises(ValueError, match=f"step {step!r} is not the number of a step: `model.checkpoints"):
        await model.rollback(step)


async def test_what_json_cannot_hold_is_named(model: art.TrainableModel, groups: list[art.TrajectoryGroup]) -> None:
    groups[0].trajectories[0].metadata["tool"] = object()
    said = r"groups\[0\].trajectories\[0\].metadata cannot be JSON .*: use texts, numbers, lists and dictionaries"
    with pytest.raises(ValueError, match=said):
        await model.train(groups)


async def test_a_row_is_no_trajectory(model: art.TrainableModel) -> None:
    rows: Any = [{"messages": []}]
    with pytest.raises(TypeError, match=r"trajectories\[0\] is a dict, not art.Trajectory: write `art.Trajectory\("):
        await model.train_sft(rows)


def test_a_misspelt_name_has_what_python_needs_for_the_one_that_was_meant() -> None:
    with pytest.raises(AttributeError) as refused:
        _ = art.TrajectoryGroups  # type: ignore[attr-defined]
    assert (refused.value.name, refused.value.obj) == ("TrajectoryGroups", art)


def test_a_string_is_no_message() -> None:
    texts: Any = [{"role": "user", "content": "hi"}, "hello"]
    with pytest.raises(ValueError, match=r"entry 1 is a string.*'role'"):
        art.Trajectory(messages_and_choices=texts)


def test_rows_of_sharegpt_are_named_with_the_remedy() -> None:
    row: Any = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "5"}]
    with pytest.raises(ValueError, match=r"entry 0 .*ShareGPT.*'role'"):
        art.Trajectory(messages_and_choices=row)
    with pytest.raises(ValueError, match=r"'conversations'.*messages_and_choices.*OpenAI's form"):
        art.Trajectory(conversations=row)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"'messages'.*messages_and_choices"):
        art.Trajectory(messages=[])  # type: ignore[call-arg]


def test_tools_as_text_are_read() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": None}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert art.Trajectory(tools=tools).tools == [tool]  # type: ignore[arg-type]
    assert art.Trajectory(tools="").tools is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tools is a text, but not of JSON"):
        art.Trajectory(tools="look")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tools\[1\] is a text, but not of JSON"):
        art.Trajectory(tools=[tool, "look"])  # type: ignore[list-item]


async def test_the_step_of_an_accepted_job_is_known(
    server: FakeServer, backend: Backend, model: art.TrainableModel, groups: list[art.TrajectoryGroup]
) -> None:
    """After Ctrl-C the program names it."""
    accepted = {"event": "accepted", "job_id": "j"}
    waiting = {"event": "waiting", "job_id": "j", "waits_for": "another job"}
    is_accepted = asyncio.Event()

    def lines() -> Any:
        yield accepted
        is_accepted.set()
        yield waiting

    server.on("POST", TRAIN, Answer(lines=lines(), hang_up=True))
    server.on("GET", "/api/jobs/j/events", Answer(lines=[waiting], hang_up=True))
    training = asyncio.create_task(model.train(groups))
    await is_accepted.wait()
    while not backend._coming_steps():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert backend._coming_steps() == {"demo/agent": 4}
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    done = {"event": "done", "job_id": "j", "step": 4}
    server.on("POST", TRAIN, Answer(lines=[accepted, done]))
    await model.train(groups)
    assert backend._coming_steps() == {}


async def test_a_dictionary_is_a_configuration(
    server: FakeServer, model: art.TrainableModel, groups: list[art.TrajectoryGroup]
) -> None:
    accepted, done = {"event": "accepted", "job_id": "j"}, {"event": "done", "job_id": "j", "step": 4}
    server.on("POST", TRAIN, lambda _: Answer(lines=[accepted, done]))
    config: Any = {"learning_rate": 3e-5}
    await model.train(groups, config=config)
    await model.submit(groups, config)
    await model.backend().train(model, groups, config)  # type: ignore[attr-defined]
    assert [request.json()["config"]["learning_rate"] for request in server.sent("POST", TRAIN)] == [3e-5] * 3
    await model.train_sft([art.Trajectory()], config)  # type: ignore[arg-type]
    assert server.sent("POST", TRAIN)[-1].json()["config"]["objective"] == "likelihood"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"learning_rate": -1}, "learning_rate is -1: it must be a number above 0"),
        ({"lr": 1e-5}, "here it is `learning_rate`"),
        (1e-5, r"config is a float, not art.TrainConfig\(learning_rate=...\)"),
        (art.TrainSFTConfig(), r"`model.train_sft` takes it"),
    ],
)
async def test_another_configuration_is_named(
    model: art.TrainableModel, groups: list[art.TrajectoryGroup], config: Any, said: str
) -> None:
    for call in (model.train, model.submit, functools.partial(model.backend().train, model)):  # type: ignore[attr-defined]
        with pytest.raises((ValueError, TypeError), match=said):
            await call(groups, config)


async def test_with_is_answered_with_async_with(model: art.TrainableModel) -> None:
    scope: Any = art.rollout(model)
    with pytest.raises(TypeError, match="write `async with"), scope:
        pass


async def test_a_rollout_that_returns_a_coroutine_has_to_await_it() -> None:
    async def forgetful() -> Any:
        return rollout()

    with pytest.raises(TypeError, match=r"returned the coroutine of rollout, .*: write `return await rollout\(...\)`"):
        await art.gather_trajectories([forgetful()])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://127.0.0.1:{port}/v1", "it does not speak TLS: write http://127.0.0.1:{port}"),
        ("http://no.such.host.invalid", "no machine has this name"),
        ("http://127.0.0.1:9", "is it running? Start it with `art-server --port 9`"),
    ],
)
async def test_an_address_that_cannot_be_reached(url: str, said: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What an HTTP server answers to the first bytes of TLS."""
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(art.ArtConnectionError) as refused:
            await model.register(art.Backend(url.format(port=port), reconnect_seconds=0))
    assert said.format(port=port) in str(refused.value)
    assert refused.value.__suppress_context__, "the HTTP library's tracebacks say nothing more"


PROGRAMS = {
    "no server": "await model.register(art.Backend('http://127.0.0.1:9'))",
    "unknown field": "art.Backend(); await model.train([], config=art.TrainConfig(learning_rte=1))",
    "negative": "art.Backend(); await model.train([], config={'learning_rate': -1})",
    "not registered": "art.Backend(); await model.train([])",
    "rollout": "art.Backend(); await art.gather_trajectory_groups([art.TrajectoryGroup(rollout() for _ in range(8))])",
}
PROGRAM = """
import asyncio
import art

async def rollout():
    return {{}}["reward"]

async def main():
    model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
    {line}

asyncio.run(main())
"""


@pytest.mark.parametrize("fault", PROGRAMS)
def test_a_program_with_a_fault_prints_at_most_25_lines(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(line=PROGRAMS[fault]))
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, cwd=tmp_path, check=False)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and len(lines) <= 25, ended.stderr
    assert "program.py" in ended.stderr and "/art_client/" not in ended.stderr and "/asyncio/" not in ended.stderr
