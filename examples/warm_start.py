"""A warm start: supervised training on demonstrations, then GRPO, on e-mail search with two tools.

Here the search of `mail_search.py` shows ids, so the agent has to read the mail with `read_mail(id)` next. art/tiny
never calls `read_mail` by itself, so no group has a reward to learn from. A scripted agent makes the demonstrations; a
real program takes a stronger model's traces (docs/howto/sft.md). The program compares step 1, after the demonstrations,
with the base model, and the last step with step 1. For a real model change `--model`; the learning rates then become
1e-4.

    python examples/warm_start.py [--model art/tiny] [--steps 6] [--server http://127.0.0.1:7623]
"""

import asyncio
import json
from contextlib import closing
from typing import Any

from learning import compare, learner_parser, train
from mail_search import Scenario, draw_scenario, open_mailbox, search
from program import OTHER_RATE, make_backend, make_model, plot
from tool_agent import functions, tool, use_tools

import art

TOOLS = [
    tool("search_mail", "Search the mails.", query={"type": "string"}),
    tool("read_mail", "Read the mail.", id={"type": "integer"}),
]
NUM_DEMONSTRATIONS, EPOCHS, BATCH_SIZE = 16, 4, 4


async def rollout(model: art.TrainableModel, scenario: Scenario) -> art.Trajectory:
    def search_mail(query: str) -> str:
        return " ".join(f"id {id}" for id, _ in search(mailbox, query)) or "no mail found"

    def read_mail(id: int) -> str:
        return f"room {scenario.mails[int(id) - 1].room}"

    dialogue = art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario.question}], tools=TOOLS)
    with closing(open_mailbox(scenario)) as mailbox:
        call = functions(search_mail=search_mail, read_mail=read_mail)
        answer = await use_tools(model, dialogue, call)
    dialogue.reward = float(scenario.answer in answer)
    return dialogue


def demonstrate(scenario: Scenario) -> art.Trajectory:
    """A conversation in which the search, the reading of the mail and the answer are right."""
    messages: list[Any] = [{"role": "user", "content": scenario.question}]
    for name, arguments, result in (
        (
            "search_mail",
            {"query": scenario.mails[scenario.asked - 1].subject},
            f"id {scenario.asked}",
        ),
        ("read_mail", {"id": scenario.asked}, scenario.answer),
    ):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": name, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": name, "content": result})
    messages.append({"role": "assistant", "content": f"The result is {scenario.answer}."})
    return art.Trajectory(messages_and_choices=messages, tools=TOOLS)


async def main() -> None:
    parser = learner_parser("SFT, then GRPO, on e-mail search.", 8, {"art/tiny": 2e-3}, steps=6)
    flags = parser.parse_args()
    model = make_model(flags, "warm-start")
    async with make_backend(flags) as backend:
        await model.register(backend)
        if await model.get_step() == 0:
            scenarios = [draw_scenario(f"example {n}") for n in range(NUM_DEMONSTRATIONS)]
            rate = flags.learning_rate or flags.learning_rates.get(flags.model, OTHER_RATE)
            config = art.TrainSFTConfig(learning_rate=rate, batch_size=BATCH_SIZE, epochs=EPOCHS)
            result = await model.train_sft([demonstrate(scenario) for scenario in scenarios], config)
            print(f"step {result.step:3d}  demonstrations: loss {result.metrics['loss/train']:.3f}")
            await compare(model, flags, rollout, draw_scenario)
        first_step = await model.get_step()
        rewards = await train(model, flags, rollout, draw_scenario)
        await compare(model, flags, rollout, draw_scenario, baseline=1)
    if rewards:
        plot({"reward": rewards}, flags.plot, "warm start", first_step)


if __name__ == "__main__":
    asyncio.run(main())
