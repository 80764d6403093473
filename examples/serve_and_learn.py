"""An agent in use gets better from the scores that it gets. Nobody calls `train`.

A crowd of 20 clients in Python, JavaScript and bash (`crowd/`) asks questions over plain HTTP. Some answers get a thumb: 30%, up to
five rounds later, a tenth of them wrongly. Users like "maybe" most, and half of them hardly like anything. The server trains a step
when enough answers are scored. Without --server the program starts an art-server.

    python examples/serve_and_learn.py [--model art/tiny] [--steps 10] [--server http://127.0.0.1:7623]
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import OTHER_RATE, flag_parser, make_backend, make_model, plot
from yes_no_maybe import PROMPTS

import art
from art_protocol.learning import Policy, default_config

LIKED = {"yes": 0.0, "no": 0.2, "maybe": 0.4}
"""What an answer adds to the probability of a thumb up."""
SEVERE, KIND = 0.05, 0.55
"""The probability of a thumb up for "yes", of the users of odd and of even questions."""
QUESTIONS = PROMPTS[:20]
SHARE_SCORED, SHARE_WRONG, LONGEST_DELAY = 0.3, 0.1, 5
BATCHES = {"smollm2": 480}
"""Scored answers that a step trains, by base model. SmolLM2 tells the questions apart, and 120 thumbs, of which each is a matter of
luck, say little of each of them: a step would unlearn by chance what it has learned."""
OTHER_BATCH = 120
NUM_CLIENTS = 20
CROWD = Path(__file__).parent / "crowd"
COMMANDS = ([sys.executable, CROWD / "client.py"], ["node", CROWD / "client.mjs"], ["bash", CROWD / "client.sh"])
"""The clients. Those whose program is not installed stay at home."""


@dataclass
class Answer:
    """What a client has of an answer."""

    id: str
    question: int
    likes: float
    """The probability of a thumb up."""
    step: int
    """The step that answered."""


def likes(question: int, text: str) -> float:
    word = text.strip().strip(".!\"'").lower()
    return (SEVERE if question % 2 else KIND) + LIKED[word] if word in LIKED else 0.0


class Client:
    """A process that posts one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reply. A failed request ends the client.

        Raises:
            RuntimeError: the client has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{path}\t{json.dumps(body)}\n".encode())
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a request failed: its client has printed why")
        return json.loads(line)


class Crowd:
    """Clients that work side by side, in rounds."""

    def __init__(self, clients: Sequence[Client], name: str) -> None:
        self._clients, self._name = clients, name

    async def ask(self) -> list[Answer]:
        """One round: each client asks each question once."""
        rounds = await asyncio.gather(*(self._ask_all(client) for client in self._clients))
        return [answer for answers in rounds for answer in answers]

    async def _ask_all(self, client: Client) -> list[Answer]:
        answers: list[Answer] = []
        for question, text in enumerate(QUESTIONS):
            body = {"model": self._name, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
            reply = await client.post("/v1/chat/completions", body)
            choice = reply["choices"][0]
            liked = likes(question, choice["message"]["content"] or "")
            answers.append(Answer(reply["id"], question, liked, choice["art"]["step"]))
        return answers

    async def give(self, scores: Sequence[tuple[Answer, bool, str]]) -> None:
        """Sends thumbs, each with its user."""
        shares = [scores[number :: len(self._clients)] for number in range(len(self._clients))]
        await asyncio.gather(*itertools.starmap(self._give_all, zip(self._clients, shares, strict=True)))

    async def _give_all(self, client: Client, scores: Sequence[tuple[Answer, bool, str]]) -> None:
        for answer, thumb, user in scores:
            body = {"answer": answer.id, "value": thumb, "user": user}
            await client.post(f"/api/models/{self._name}/feedback", body)


@contextlib.asynccontextmanager
async def gathered(url: str, key: str, name: str) -> AsyncIterator[Crowd]:
    """A crowd that talks to a model, and goes home at the end."""
    installed = [command for command in COMMANDS if shutil.which(command[0])]
    commands = itertools.islice(itertools.cycle(installed), NUM_CLIENTS)
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    environment = os.environ | {"ART": url, "KEY": key}
    processes = [await asyncio.create_subprocess_exec(*command, **pipes, env=environment) for command in commands]
    try:
        yield Crowd([Client(process) for process in processes], name)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


async def use(crowd: Crowd, model: art.TrainableModel, steps: int, seed: int) -> list[float]:
    """Rounds of questions and late thumbs until a step has answered half of a round. Returns the expected share of thumbs up of each
    step."""
    dice = random.Random(seed)
    due: dict[int, list[tuple[Answer, bool, str]]] = {}
    by_step: dict[int, list[Answer]] = {}
    try:
        for number in itertools.count():
            answers = await crowd.ask()
            for answer in answers:
                by_step.setdefault(answer.step, []).append(answer)
                if dice.random() < SHARE_SCORED:
                    is_wrong = dice.random() < SHARE_WRONG
                    thumb = (dice.random() < answer.likes) != is_wrong
                    score = (answer, thumb, f"user-{dice.randrange(200)}")
                    due.setdefault(number + dice.randint(0, LONGEST_DELAY), []).append(score)
            await crowd.give(due.pop(number, []))
            info = await model.learning()
            mean = statistics.fmean(answer.likes for answer in answers)
            answered = f"answered by step {max(by_step)}"
            print(f"round {number:2d}  expected thumbs up {mean:.3f}  {answered}; {info.reason}", flush=True)
            num_by_last = sum(len(by_step[step]) for step in by_step if step >= steps)
            is_paused = info.state == "paused"  # the guard has refused three steps in a row
            if num_by_last >= len(answers) // 2 or is_paused:
                break
    finally:  # also of an interrupted run
        rewards = {step: mean_of(by_step[step]) for step in sorted(by_step)}
        print("by step:", "  ".join(f"{step} {reward:.3f}" for step, reward in rewards.items()), flush=True)
    return list(rewards.values())


def mean_of(answers: Sequence[Answer]) -> float:
    """The mean over questions, which a step that served for a part of a round has not answered equally often."""
    by_question: dict[int, list[float]] = {}
    for answer in answers:
        by_question.setdefault(answer.question, []).append(answer.likes)
    return statistics.fmean(map(statistics.fmean, by_question.values()))


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 6, {"art/tiny": 2e-3, "smollm2": 5e-4})
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(steps=10)
    flags = parser.parse_args()
    async with make_backend(flags) as backend:
        model = make_model(flags, "serve-and-learn")
        await model.register(backend)
        rate = flags.learning_rate or flags.learning_rates.get(flags.model, OTHER_RATE)
        config = default_config().model_copy(update={"learning_rate": rate})
        await model.learn(Policy(batch=BATCHES.get(flags.model, OTHER_BATCH), config=config))
        async with gathered(backend.base_url, model.inference_api_key or "", model.get_inference_name()) as crowd:
            rewards = await use(crowd, model, flags.steps, flags.seed)
    plot({"expected thumbs up": rewards}, flags.plot, "learning from thumbs")


if __name__ == "__main__":
    asyncio.run(main())
