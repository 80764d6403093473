"""The program of ART's cheatsheet, as its users write it, against a server that samples and trains nothing."""

from dataclasses import dataclass

import pytest

import art

pytestmark = pytest.mark.anyio

NUM_STEPS, GROUP_SIZE = 2, 3


@dataclass
class Scenario:
    prompt: str


def score(answer: str | None, scenario: Scenario) -> float:
    return float(answer == scenario.prompt)


async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    client = model.openai_client()
    traj = art.Trajectory(messages_and_choices=[], reward=0.0)
    messages = [{"role": "user", "content": scenario.prompt}]
    completion = await client.chat.completions.create(
        model=model.name,
        messages=messages,  # type: ignore[arg-type]  # as the cheatsheet has it
    )
    choice = completion.choices[0]
    traj.messages_and_choices.append(choice)
    traj.reward = score(choice.message.content, scenario)  # your reward fn
    return traj


async def test_the_cheatsheet_runs_as_written(server, answer, backend: art.Backend):
    def complete(request):
        content = request.json()["messages"][0]["content"]
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [7]}
        return answer(body={"id": "c", "choices": [choice], "prompt_token_ids": [1, 2]})

    def train(request):
        steps.append(request.json())
        return answer(lines=[{"event": "done", "job_id": "j", "step": len(steps)}])

    steps = []
    server.on("POST", "/v1/chat/completions", complete)
    server.on("POST", "/api/models/my-agent/agent-001/train", train)
    scenarios = [Scenario("one"), Scenario("two")]

    model = art.TrainableModel(name="agent-001", project="my-agent", base_model="Qwen/Qwen2.5-7B-Instruct")
    await model.register(backend)
    for _step in range(NUM_STEPS):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, s) for _ in range(GROUP_SIZE)) for s in scenarios
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))

    assert len(steps) == NUM_STEPS
    for body in steps:
        assert [len(group["trajectories"]) for group in body["groups"]] == [GROUP_SIZE] * 2
        trajectory = body["groups"][1]["trajectories"][2]
        choice = trajectory["messages_and_choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([7], [1, 2])
        assert trajectory["reward"] == 1.0
