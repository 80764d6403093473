"""Episodes in text environments, with a scripted policy."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import art
from art.environments import ReasoningTask, play, reasoning_gym
from tests.quick.client.conftest import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio


class Guess:
    """A number is guessed. Each guess costs 0.1, the right one earns 1."""

    def __init__(self, wanted: int, patience: int = 9):
        self.wanted, self.left, self.seed = wanted, patience, None

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        guess = int(action)
        hint = "higher" if guess < self.wanted else "lower"
        is_right = guess == self.wanted
        told = {"distance": abs(guess - self.wanted), "hint": hint}
        return hint, is_right - 0.1, is_right, self.left == 0, told


class SlowGuess(Guess):
    """The same with coroutines."""

    async def reset(self, **options: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(**options)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


@pytest.fixture
async def policy(server: FakeServer) -> AsyncIterator[art.Model]:
    """Counts its own answers: "1", "2"..."""

    def reply(request: Request) -> Answer:
        messages = request.json()["messages"]
        said = str(1 + [message["role"] for message in messages].count("assistant"))
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        kind = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return Answer(body=kind | {"choices": [choice]})

    server.on("POST", "/v1/chat/completions", reply)
    model = art.Model(
        name="m",
        project="p",
        inference_model_name="m",
        inference_base_url=f"{server.url}/v1",
        inference_api_key="k",
    )
    yield model
    await model.close()


@pytest.mark.parametrize("kind", [Guess, SlowGuess])
async def test_an_episode_becomes_a_trajectory(policy: art.Model, server: FakeServer, kind: type[Guess]) -> None:
    environment = kind(3)
    played = await play(policy, environment, seed=5, system_prompt="Be brief.", max_tokens=7)
    assert environment.seed == 5
    texts = [(message["role"], message.get("content")) for message in played.messages()]
    assert texts == [
        ("system", "Be brief."),
        ("user", "Guess."),
        *(("assistant", "1"), ("user", "higher")),
        *(("assistant", "2"), ("user", "higher")),
        ("assistant", "3"),
    ]
    assert played.reward == pytest.approx(0.7)
    assert played.metrics == {"distance": 0, "num_turns": 3, "truncated": False}
    assert all(request.json()["max_tokens"] == 7 for request in server.requests)


async def test_an_episode_ends_at_the_environment_s_limit_and_at_ours(policy: art.Model) -> None:
    by_it = await play(policy, Guess(9, patience=2))
    by_us = await play(policy, Guess(9), max_turns=2)
    for played in (by_it, by_us):
        assert played.metrics["num_turns"] == 2 and played.metrics["truncated"]
        assert played.messages()[-1]["role"] == "assistant" and played.reward < 0


async def test_an_environment_that_fails_fails_its_rollout(policy: art.Model) -> None:
    class Broken(Guess):
        def step(self, action: str) -> Any:
            raise OSError("the game has crashed")

    group = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(play(policy, environment) for environment in (Guess(1), Broken(1)))],
        max_exceptions=1,
    )
    assert len(group[0].trajectories) == 1 and "crashed" in group[0].exceptions[0].message


async def test_metrics_are_the_finite_numbers_of_the_information(policy: art.Model) -> None:
    class Told(Guess):
        def step(self, action: str) -> Any:
            told = {"share": np.float32(0.5), "num": np.int64(3), "text": "3", "column": [1, 2]}
            return "", 1.0, True, False, told | {"infinite": np.inf, "unknown": float("nan")}

    played = await play(policy, Told(1))
    assert played.metrics == {"share": 0.5, "num": 3, "num_turns": 1, "truncated": False}


async def test_tools_of_the_requests_are_the_trajectory_s(policy: art.Model, server: FakeServer) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    played = await play(policy, Guess(1), tools=tools)
    assert played.tools == tools == server.requests[0].json()["tools"]


def make_task(generator: str, **settings: Any) -> ReasoningTask:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    (task,) = reasoning_gym(generator, size=1, seed=1, **settings)
    return task


async def test_a_task_scores_the_tagged_answer() -> None:
    task = make_task("number_sorting")
    right = task.entry["answer"]
    assert task.score(f" {right}\n") == 1.0
    assert task.score(f"<answer>3</answer> no: <answer> {right} </answer>") == 1.0
    assert task.score(f"<answer>{right}</answer> or <answer>3") == 1.0
    assert task.score(f"<answer>3</answer> {right}") == 0.0
    assert task.reset(seed=3) == (task.question, {})
    assert await task.step(right) == ("", 1.0, True, False, {"solved": True})


def test_tags_that_end_nowhere_are_read_once() -> None:
    """To read them once for each tag would take hours."""
    assert make_task("number_sorting").score("<answer>" * 1_000_000) == 0.0


async def test_an_answer_that_hangs_scores_zero_while_the_program_goes_on() -> None:
    task = make_task("string_insertion")
    scoring = asyncio.create_task(task.step("9**9**9**9"))
    num_turns = 0
    while not scoring.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert scoring.result()[1] == 0.0 and num_turns > 1
    assert task.score(task.entry["answer"]) == 1.0


def test_code_in_an_answer_runs_in_a_limited_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_API_KEY", "secret")
    task, file = make_task("string_insertion"), tmp_path / "written"
    code = "__import__('os').environ.get('ART_API_KEY', 'none') + ' ' * (1 << 24)"
    assert task.score(f"open({str(file)!r}, 'w').write({code})") == 0.0
    assert file.read_text().startswith("none") and file.stat().st_size <= 1 << 20
    file.unlink()
    many = f"['x' * (1 << 31), open({str(file)!r}, 'w')]"
    assert task.score(many) == 0.0 and not file.exists(), "it gets no memory"
    assert task.score("__import__('os')._exit(0)") == 0.0
    assert task.score(task.entry["answer"]) == 1.0


@pytest.mark.parametrize("text", ["nan", "1e999", "no number"])
def test_what_an_answer_writes_as_its_score_is_a_number_or_zero(text: str) -> None:
    task = make_task("string_insertion")
    pipes = "[fd for fd in range(40, 2, -1) if os.path.exists(f'/proc/self/fd/{fd}') and 'pipe' in os.readlink(f'/proc/self/fd/{fd}')]"
    code = f"[(lambda os: [os.write(fd, {text.encode()!r}) for fd in {pipes}])(__import__('os'))]"
    assert task.score(code) == 0.0
    assert task.score(task.entry["answer"]) == 1.0


def test_a_dead_scorer_fails_an_answer_and_starts_again() -> None:
    task = make_task("string_insertion")
    with pytest.raises(RuntimeError):
        task.score("__import__('os').kill(__import__('os').getppid(), 9)")
    assert task.score(task.entry["answer"]) == 1.0


def test_a_dataset_that_the_scorer_cannot_make_is_an_error() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(RuntimeError, match="ValueError"):
        ReasoningTask("1 + 1?", "no_such_generator", {}, {"answer": "2"}).score("2")


def test_generators_give_the_same_tasks_for_the_same_seed() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    form = "{question}\nAnswer {with} braces."
    one, same = (reasoning_gym("chain_sum", size=3, seed=1, prompt=form) for _ in range(2))
    other = reasoning_gym("chain_sum", size=3, seed=2)
    assert [task.question for task in one] == [task.question for task in same]
    assert not {task.question for task in one} & {task.question for task in other}
    assert one[0].question.endswith("\nAnswer {with} braces.")
    assert all(task.score(task.entry["answer"]) == 1.0 for task in one)
    with pytest.raises(ValueError, match="no_such_generator"):
        reasoning_gym("no_such_generator")


@pytest.mark.parametrize(
    ("generator", "answer"),
    [("prime_factorization", "two times three"), ("boxnet", "[1,2]"), ("game_of_life", "{}")],
)
def test_an_answer_of_another_form_scores_zero(generator: str, answer: str) -> None:
    """Their errors are ValueError, AttributeError and KeyError."""
    assert make_task(generator).score(answer) == 0.0
