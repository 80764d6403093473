"""`art.evaluate` against a server that answers each model name with its own number, and records what it gets."""

import asyncio
import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

import art
from art.evaluation import evaluate

pytestmark = pytest.mark.anyio

REWARDS = {"demo/agent@3": 0.75, "demo/agent@0": 0.25, "art/tiny": 0.5, "demo/agent": -1.0}
"""By the name that samples. The bare name is the newest step, which moves."""
CHAT, LOG = "/v1/chat/completions", "/api/models/demo/agent/log"


@pytest.fixture(autouse=True)
def answers(server, answer) -> None:
    def complete(request):
        message = {"role": "assistant", "content": str(REWARDS[request.json()["model"]])}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [1, 2]}
        path, _, step = request.json()["model"].partition("@")
        is_base = path == "art/tiny"
        choice["art"] = {"model": None if is_base else path, "step": int(step or 3)}
        return answer(body={"id": "c", "object": "chat.completion", "choices": [choice]})

    server.on("POST", CHAT, complete)
    server.on("POST", LOG, answer(body={"step": 3, "metrics": {}}))


async def rollout(model: art.TrainableModel, scenario: float) -> art.Trajectory:
    """The reward is the model's answer plus the scenario; as in the examples."""
    messages: art.Messages = [{"role": "user", "content": str(scenario)}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages
    )
    choice = completion.choices[0]
    reward = float(choice.message.content or "nan") + scenario
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metrics={"won": reward > 1})


def sampled(server) -> list[str]:
    return [request.json()["model"] for request in server.sent("POST", CHAT)]


def logged(server) -> list[dict[str, Any]]:
    return [request.json() for request in server.sent("POST", LOG)]


class ToolDown(Exception):
    pass


def failing(*places: int) -> Callable[[art.TrainableModel, float], Any]:
    """A rollout whose calls with these numbers, from 0, fail."""
    calls = iter(range(1000))

    async def fails(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        number = next(calls)
        if number in places:
            raise ToolDown(f"tool {number} is down")
        return await rollout(model, scenario)

    return fails


# --- what is sampled --------------------------------------------------------------------------------------------------


async def test_the_newest_step_is_resolved_once(server, answer, model: art.TrainableModel):
    async def trains(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        info = {"name": "agent", "project": "demo", "base_model": "art/tiny", "step": 9}
        info |= {"inference_name": "demo/agent", "lora": {}}
        server.on("GET", "/api/models/demo/agent", answer(body=info))
        return await rollout(model, scenario)

    evaluation = await evaluate(model, trains, [0.0, 0.5])
    assert sampled(server) == ["demo/agent@3"] * 2
    assert (evaluation.step, evaluation.name, evaluation.scenario_rewards) == (3, "demo/agent@3", (0.75, 1.25))
    assert logged(server)[0]["step"] == 3


@pytest.mark.parametrize("reads", ["get_inference_name", "name", "inference_model_name"])
@pytest.mark.parametrize(
    ("step", "names"), [(0, {"demo/agent@0", "agent@0"}), (None, {"demo/agent@3", "agent@3"}), ("base", {"art/tiny"})]
)
async def test_every_name_of_the_model_is_that_of_the_step(
    model: art.TrainableModel, step: Any, names: set[str], reads: str
):
    seen: list[object] = []

    async def reads_name(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        name = getattr(model, reads)
        seen.append(name() if callable(name) else name)
        return art.Trajectory(reward=scenario)

    await evaluate(model, reads_name, [0.0], step=step, log=False)
    assert seen and set(seen) <= names


async def test_all_rollouts_use_the_same_connections(server, model: art.TrainableModel):
    """Also if the model had no client before."""
    used: list[object] = []

    async def asks(pinned: art.TrainableModel, scenario: float) -> art.Trajectory:
        used.append(pinned.openai_client()._client)
        return await rollout(pinned, scenario)

    await evaluate(model, asks, [0.0, 1.0], reps=4, seed=1, log=False)
    await evaluate(model, asks, [0.0], log=False)
    assert len(used) == 9 and set(used) == {model.openai_client()._client}


async def test_nothing_leaks_into_the_model(server, model: art.TrainableModel):
    before, client = model.model_dump(), model.openai_client()

    async def inspects(pinned: art.TrainableModel, scenario: float) -> art.Trajectory:
        assert pinned is not model and pinned.backend() is model.backend()
        assert pinned.get_inference_name(2) == "demo/agent@2"
        assert await pinned.get_step() == 3, "on the server it is the same model"
        assert copy.deepcopy(pinned).get_inference_name() == "demo/agent@0"
        return await rollout(pinned, scenario)

    await evaluate(model, inspects, [0.0], step=0, seed=1)
    assert model.model_dump() == before and model.openai_client() is client
    assert model.get_inference_name() == "demo/agent"
    await client.chat.completions.create(model=model.get_inference_name(), messages=[{"role": "user", "content": "hi"}])
    assert "seed" not in server.sent("POST", CHAT)[-1].json()


async def test_a_model_with_another_name_on_the_server_is_evaluated_there(server, answer, backend: art.Backend):
    model = art.TrainableModel(name="mine", run_name="agent", project="demo", base_model="art/tiny")
    await model.register(backend)
    evaluation = await evaluate(model, rollout, [0.0], step=0)
    assert evaluation.name == "demo/agent@0" and len(logged(server)) == 1


async def test_rollouts_of_one_evaluation_share_their_connections(server, model):
    clients: set[int] = set()

    async def inspects(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        clients.add(id(model.openai_client()._client))
        return await rollout(model, scenario)

    await evaluate(model, inspects, [0.0] * 5, seed=0)
    assert len(clients) == 1


async def test_a_rollout_that_exits_has_failed(server, model: art.TrainableModel):
    async def exits(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        await asyncio.gather(asyncio.to_thread(sys.exit, 0) if scenario < 0 else rollout(model, scenario))
        return art.Trajectory(reward=scenario)

    evaluation = await evaluate(model, exits, [-1.0, 1.0, 1.0], max_exceptions=1, log=False)
    assert (evaluation.num_rollouts, evaluation.num_failed, evaluation.reward.mean) == (3, 1, 1.0)


# --- seeds ------------------------------------------------------------------------------------------------------------


async def ask_twice(model: art.TrainableModel, scenario: float) -> art.Trajectory:
    await rollout(model, scenario)
    return await rollout(model, scenario)


def seeds_by_model(server) -> dict[str, list[int]]:
    by_model: dict[str, list[int]] = {}
    for request in server.sent("POST", CHAT):
        by_model.setdefault(request.json()["model"], []).append(request.json()["seed"])
    return {name: sorted(seeds) for name, seeds in by_model.items()}


async def test_requests_have_their_own_seeds_and_partners_the_same(server, model):
    options: Any = {"step": 3, "baseline": 0, "reps": 2, "log": False}
    first = await evaluate(model, ask_twice, [0.0, 0.5], seed=7, **options)
    seeds = seeds_by_model(server)
    assert seeds["demo/agent@3"] == seeds["demo/agent@0"]
    assert len(set(seeds["demo/agent@3"])) == 2 * 2 * 2, "scenarios, repetitions, requests"
    server.requests.clear()
    second = await evaluate(model, ask_twice, [0.0, 0.5], seed=7, **options)
    assert seeds_by_model(server) == seeds and second == first
    server.requests.clear()
    await evaluate(model, ask_twice, [0.0, 0.5], seed=8, **options)
    assert not set(seeds_by_model(server)["demo/agent@3"]) & set(seeds["demo/agent@3"])


async def test_the_callers_seed_wins_and_copies_of_the_client_have_seeds(server, model):
    async def asks(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        messages: Any = [{"role": "user", "content": "hi"}]
        name = model.get_inference_name()
        client = model.openai_client()
        await client.chat.completions.create(model=name, messages=messages, seed=5)
        await client.with_options(timeout=9).chat.completions.create(model=name, messages=messages)
        await client.copy().chat.completions.create(model=name, messages=messages)
        async with art.rollout(model) as r:
            await r.openai_client().chat.completions.create(model=name, messages=messages)
        return art.Trajectory(reward=0.0)

    await evaluate(model, asks, [0.0], seed=0, log=False)
    own, *from_the_evaluation = [request.json()["seed"] for request in server.sent("POST", CHAT)]
    assert own == 5 and len(set(from_the_evaluation)) == 3


async def test_without_a_seed_requests_have_none(server, model):
    await evaluate(model, rollout, [0.0])
    assert "seed" not in server.sent("POST", CHAT)[0].json()


# --- numbers ----------------------------------------------------------------------------------------------------------


async def test_repetitions_are_averaged_before_the_error_is_computed(model):
    """Scenarios (0, 2), (2, 2), (0, 0): means 1, 2, 0, so s = 1 and the error is 1 / sqrt(3); t = 4.303."""
    values = iter([0.0, 2.0, 2.0, 2.0, 0.0, 0.0])

    async def draws(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        return art.Trajectory(reward=next(values))

    evaluation = await evaluate(model, draws, "abc", reps=2, log=False)
    assert evaluation.scenario_rewards == (1.0, 2.0, 0.0)
    assert (evaluation.reward.mean, evaluation.reward.num_scenarios, evaluation.num_rollouts) == (1.0, 3, 6)
    assert evaluation.reward.standard_error == pytest.approx(1 / math.sqrt(3))
    assert evaluation.reward.interval == pytest.approx((1 - 2.4842, 1 + 2.4842), abs=1e-4)


async def test_the_interval_of_a_share_stays_between_0_and_1(model):
    """63 of 64 right: mean ± t * s / sqrt(n) would end at 1.015."""
    values = iter([0.0] + [1.0] * 63)

    async def draws(model: art.TrainableModel, scenario: int) -> art.Trajectory:
        return art.Trajectory(reward=next(values))

    evaluation = await evaluate(model, draws, range(64), log=False)
    assert evaluation.reward.interval == pytest.approx((0.9167, 0.9972), abs=1e-4)


async def test_two_steps_are_compared_scenario_by_scenario(server, model):
    """Both steps see hard and easy scenarios, whose spread drops out of the difference."""
    evaluation = await evaluate(model, rollout, [0.0, 10.0, 20.0], step=3, baseline=0)
    assert evaluation.difference == art.Estimate(0.5, 3, 0.0, (0.5, 0.5))
    assert evaluation.baseline is not None and evaluation.baseline.reward.mean == 10.25
    assert evaluation.reward.interval[0] < 0 < 20 < evaluation.reward.interval[1]
    assert [(body["step"], body["split"]) for body in logged(server)] == [(3, "val"), (0, "val")]


async def test_the_bar_tells_the_steps_apart(model, capsys: pytest.CaptureFixture[str]):
    await evaluate(model, rollout, [0.0, 1.0], step=3, baseline=0, log=False)
    bar = capsys.readouterr().err.splitlines()[-1]
    assert "4/4" in bar and "reward@3=1.25, reward@0=0.75" in bar and "won@3=0.5, won@0=0.5" in bar
    await evaluate(model, rollout, [0.0], step=3, baseline="base", log=False)
    assert "reward@3=0.75, reward@base=0.5" in capsys.readouterr().err.splitlines()[-1]


async def test_the_difference_is_worked_by_hand(model):
    """Differences by repetition (2, 0), (1, 1), (0, -2): scenario means 1, 1, -1, so mean 1/3 and s 1.1547."""
    values = iter([2, 0, 0, 0, 1, 0, 2, 1, 0, 0, 0, 2])

    async def draws(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        return art.Trajectory(reward=next(values))

    evaluation = await evaluate(model, draws, "abc", reps=2, baseline=0, log=False)
    assert evaluation.difference is not None and evaluation.difference.mean == pytest.approx(1 / 3)
    assert evaluation.difference.standard_error == pytest.approx(2 / 3)
    assert evaluation.difference.interval == pytest.approx((1 / 3 - 2.8684, 1 / 3 + 2.8684), abs=1e-4)


async def test_the_base_is_compared_but_has_no_history(server, model):
    evaluation = await evaluate(model, rollout, [0.0, 1.0], baseline="base")
    assert evaluation.baseline is not None and evaluation.difference is not None
    assert (evaluation.baseline.step, evaluation.baseline.name) == (None, "art/tiny")
    assert evaluation.difference.mean == 0.25
    assert [body["step"] for body in logged(server)] == [3]
    base = await evaluate(model, rollout, [0.0], step="base", baseline=0, log=False)
    assert (base.step, base.reward.mean) == (None, 0.5) and len(logged(server)) == 1


async def test_metrics_are_means_over_scenarios(model):
    rows: Any = iter([{"a": 1}, {"a": 0, "b": 3}, {"a": True}, {}])

    async def draws(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        return art.Trajectory(metrics=next(rows))

    evaluation = await evaluate(model, draws, "xy", reps=2, log=False)
    assert evaluation.metrics == {"a": 0.75, "b": 3.0}


async def test_a_group_has_the_metadata_that_its_trajectories_share(model):
    rows: Any = iter([{"row": "a", "try": 1}, {"row": "a", "try": 2}, {"row": "b"}, {}])

    async def draws(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        return art.Trajectory(metadata=next(rows))

    evaluation = await evaluate(model, draws, "xy", reps=2, log=False)
    assert [group.metadata for group in evaluation.groups] == [{"row": "a"}, {}]


async def test_a_result_reads_in_one_line(model):
    evaluation = await evaluate(model, failing(5), [0.0, 1.0, 2.0], step=3, baseline=0, max_exceptions=1)
    assert (
        repr(evaluation)
        == str(evaluation)
        == (
            "Evaluation(demo/agent@3: reward 1.75 (95% -0.7341 to 4.234, n=3); "
            "demo/agent@0: reward 0.75 (95% -5.603 to 7.103, n=2), 1 of 3 rollouts failed; "
            "difference 0.5 (95% 0.5 to 0.5, n=2), 1 left out)"
        )
    )
    alone = await evaluate(model, rollout, [0.0], log=False)
    assert repr(alone) == "Evaluation(demo/agent@3: reward 0.75 (no interval from 1 row))"


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failed_rollout_is_no_reward_and_its_pair_is_left_out(server, model):
    """Calls alternate between step and baseline. The third call is the second scenario at the step."""
    scenarios = [0.0, 1.0, 2.0]
    evaluation = await evaluate(model, failing(2), scenarios, baseline=0, max_exceptions=1)
    assert evaluation.scenario_rewards == (0.75, None, 2.75)
    assert (evaluation.reward.mean, evaluation.reward.num_scenarios) == (1.75, 2)
    assert (evaluation.num_failed, evaluation.num_unpaired) == (1, 1)
    assert evaluation.difference is not None and evaluation.difference.num_scenarios == 2
    assert evaluation.baseline is not None and evaluation.baseline.num_failed == 0
    assert [failure.message for group in evaluation.groups for failure in group.exceptions] == ["tool 2 is down"]
    assert [len(group["exceptions"]) for group in logged(server)[0]["groups"]] == [0, 1, 0]


async def test_with_repetitions_the_other_pairs_of_a_scenario_count(model):
    evaluation = await evaluate(model, failing(0), [0.0, 1.0], baseline=0, reps=2, max_exceptions=1)
    assert evaluation.scenario_rewards == (0.75, 1.75)
    assert evaluation.difference == art.Estimate(0.5, 2, 0.0, (0.5, 0.5)) and evaluation.num_unpaired == 1


async def test_a_tenth_of_the_rollouts_may_fail(server, model):
    assert (await evaluate(model, failing(0), [0.0] * 10)).num_failed == 1
    with pytest.raises(ToolDown, match="tool 0"):
        await evaluate(model, failing(0, 1), [0.0] * 10)
    assert len(logged(server)) == 1


async def test_without_any_reward_the_first_failure_is_raised(server, model):
    with pytest.raises(ToolDown, match="tool 0") as error:
        await evaluate(model, failing(*range(9)), [0.0] * 3, max_exceptions=math.inf)
    assert error.value.__notes__ == ["no rollout succeeded, so there is no mean reward"]
    with pytest.raises(ToolDown, match="tool 0"):
        await evaluate(model, failing(0, 3), [0.0] * 2, baseline=0, max_exceptions=2)
    assert logged(server) == []


@pytest.mark.parametrize("fields", [{"reward": math.nan}, {"reward": math.inf}, {"metrics": {"won": math.nan}}])
async def test_a_number_that_is_not_finite_is_a_failure(model, fields: dict[str, Any]):
    async def draws(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        return art.Trajectory(**fields) if scenario else art.Trajectory(reward=1.0)

    with pytest.raises(ValueError, match=r"(reward|won)=(nan|inf)"):
        await evaluate(model, draws, [0.0, 1.0])
    evaluation = await evaluate(model, draws, [0.0, 1.0], max_exceptions=1)
    assert (evaluation.reward.mean, evaluation.num_failed) == (1.0, 1)


@pytest.mark.parametrize("step", [0, "base"])
async def test_a_rollout_that_samples_from_another_step_fails(model, step: Any):
    async def uses_a_variable(_: art.TrainableModel, scenario: float) -> art.Trajectory:
        return await rollout(model, scenario)

    with pytest.raises(ValueError, match="demo/agent@3"):
        await evaluate(model, uses_a_variable, [0.0], step=step)
    evaluation = await evaluate(model, uses_a_variable, [5.0])
    assert evaluation.reward.mean == 4.0, "the newest step's bare name is right there"


async def test_an_opponent_may_be_any_model(model):
    async def plays(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        trajectory = await rollout(model, scenario)
        theirs: Any = {"role": "assistant", "content": "x", "art": {"model": "demo/rival", "step": 7}}
        trajectory.messages_and_choices.append(theirs)
        return trajectory

    assert (await evaluate(model, plays, [0.0], step=0)).num_failed == 0


async def test_what_is_no_trajectory_is_a_failure(model):
    async def returns_none(model: art.TrainableModel, scenario: float) -> Any:
        return None

    with pytest.raises(TypeError, match="NoneType"):
        await evaluate(model, returns_none, [0.0])


# --- history, arguments -----------------------------------------------------------------------------------------------


async def test_the_history_gets_the_means_the_error_and_the_trajectories(server, model):
    await evaluate(model, rollout, [0.0, 1.0], step=3, split="test")
    (body,) = logged(server)
    assert (body["split"], body["step"]) == ("test", 3)
    assert body["metrics"] == {
        "test/reward": 1.25,
        "test/reward_standard_error": pytest.approx(0.5),
        "test/num_scenarios": 2.0,
        "test/won": 0.5,
        "test/completion_tokens": 2.0,
    }
    assert [group["trajectories"][0]["reward"] for group in body["groups"]] == [0.75, 1.75]


async def test_a_history_that_cannot_be_written_does_not_lose_the_rollouts(
    server, answer, model, caplog: pytest.LogCaptureFixture
):
    error = {"message": "the disk is full: free space", "code": "disk_full", "retryable": False}
    server.on("POST", LOG, answer(507, {"error": error}))
    evaluation = await evaluate(model, rollout, [0.0, 1.0], step=3, baseline=0)
    assert evaluation.reward.mean == 1.25 and evaluation.difference is not None
    assert evaluation.difference.mean == 0.5
    warnings = [record.getMessage() for record in caplog.records if record.name == "art.evaluation"]
    assert [line.split()[1] for line in warnings] == ["demo/agent@3", "demo/agent@0"]
    assert all("the disk is full" in line for line in warnings)
    assert "model.log(result.groups, 'val', step=3)" in warnings[0]
    assert "model.log(result.baseline.groups, 'val', step=0)" in warnings[1]
    server.on("POST", LOG, answer(body={"step": 3, "metrics": {}}))
    await model.log(evaluation.groups, "val", step=3)
    assert logged(server)[-1]["groups"][1]["trajectories"][0]["reward"] == 1.75


async def test_a_history_that_cannot_be_encoded_does_not_lose_the_rollouts(
    server, model, caplog: pytest.LogCaptureFixture
):
    async def odd(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        trajectory = await rollout(model, scenario)
        trajectory.metadata["scenario"] = object()
        return trajectory

    evaluation = await evaluate(model, odd, [0.0, 1.0], step=3)
    assert evaluation.reward.mean == 1.25
    assert "demo/agent@3 is not in the history" in caplog.text


async def test_one_scenario_has_no_error_to_log(server, model):
    await evaluate(model, rollout, [0.0])
    assert "val/reward_standard_error" not in logged(server)[0]["metrics"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"scenarios": []}, "scenarios"),
        ({"reps": 0}, "reps"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"baseline": "bse"}, "baseline"),
        ({"split": "a/b"}, "split"),
    ],
)
async def test_wrong_arguments_are_refused_before_a_request(server, model, arguments, field):
    server.requests.clear()
    with pytest.raises(ValueError, match=f"^{field}|`{field}`"):
        await evaluate(model, rollout, **{"scenarios": [0.0], **arguments})
    assert server.requests == []


async def test_a_model_that_is_not_registered_is_refused():
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    with pytest.raises(ValueError, match="register"):
        await evaluate(model, rollout, [0.0])


async def test_rollouts_are_bounded(model):
    running = [0, 0]

    async def counts(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.002)
        running[0] -= 1
        return art.Trajectory()

    await evaluate(model, counts, [0.0] * 9, max_concurrent_rollouts=2, log=False)
    assert running[1] == 2
