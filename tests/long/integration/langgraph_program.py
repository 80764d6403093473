"""Trains one step with `art.langgraph`, as programs written for ART do. Runs in .venv-frameworks, beside
examples/frameworks (PYTHONPATH), with ART_SERVER_URL. Prints the step's report."""

import asyncio
from typing import Any

import task
from langchain.agents import create_agent

import art
from art.langgraph import init_chat_model, wrap_rollout


async def rollout(model: art.TrainableModel, question: task.Question) -> art.Trajectory:
    chat = init_chat_model(model.name, temperature=1.0, max_tokens=task.MAX_TOKENS)
    agent: Any = create_agent(chat, tools=task.TOOLS)
    state = await agent.ainvoke({"messages": [{"role": "user", "content": question.text}]})
    answer = state["messages"][-1].text
    return art.Trajectory(reward=task.score(question, answer), metadata={"answer": answer})


async def main() -> None:
    model = art.TrainableModel(name="wrapped", project="frameworks", base_model="art/tiny")
    async with art.Backend() as backend:
        await model.register(backend)
        questions = [task.draw_question(str(number)) for number in range(4)]
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(wrap_rollout(model, rollout)(model, question) for _ in range(8))
                for question in questions
            ),
            max_exceptions=0.5,
            max_concurrent_rollouts=8,
        )
        trajectory = groups[0].trajectories[0]
        roles = [message["role"] for message in trajectory.messages()]
        assert roles[0] == "user" and "tool" in roles and trajectory.tools, roles
        assert trajectory.metadata["answer"] == trajectory.messages()[-1]["content"]
        result = await model.train(groups, art.TrainConfig(learning_rate=1e-3))
        print(result.report.model_dump_json())


asyncio.run(main())
