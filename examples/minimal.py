"""The loop in thirty lines: roll out, score, train, again."""

import asyncio

import art

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": question}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12
    )
    choice = completion.choices[0]
    reward = REWARDS.get(choice.message.content or "", 0.0)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def main() -> None:
    model = art.TrainableModel(name="agent-001", project="minimal", base_model="art/tiny")
    # For a server on another machine: art.Backend("http://gpu-box:7623", api_key="...")
    async with art.LocalBackend() as backend:
        await model.register(backend)
        for _ in range(await model.get_step(), 12):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, "respond with yes, no, maybe") for _ in range(8)) for _ in range(4)
            )
            result = await model.train(groups, config=art.TrainConfig(learning_rate=2e-3))
            print(f"step {result.step}: mean reward {result.metrics['train/reward']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
