"""The loop in thirty lines: roll out, score, train, again."""

import asyncio

import art


async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": question}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12
    )
    choice = completion.choices[0]
    reward = 1.0 if choice.message.content == "maybe" else 0.0
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def main() -> None:
    model = art.TrainableModel(name="agent-001", project="minimal", base_model="art/tiny")
    # For a server on another machine: art.Backend("http://gpu-box:7623", api_key="...")
    async with art.LocalBackend() as backend:
        await model.register(backend)
        for _ in range(3):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, "respond with yes, no, maybe") for _ in range(8))
                for _ in range(4)
            )
            result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
            print(result.step, result.metrics["train/reward"])


if __name__ == "__main__":
    asyncio.run(main())
