"""An agent in use gets better from the scores that it gets. Nobody calls `train`.

A crowd of clients asks questions over plain HTTP. Some answers get a thumb: 30%, up to five rounds later, a tenth of them wrongly.
Users like "maybe" most, and half of them hardly like anything. The server trains a step when enough answers are scored. Without
--server the program starts an art-server.

    python examples/serve_and_learn.py [--model art/tiny] [--steps 10] [--server http://127.0.0.1:7623]
"""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from program import flag_parser, make_backend, make_model, plot
from yes_no_maybe import PROMPTS

from art_protocol.learning import Policy, default_config

LIKED = {"yes": 0.0, "no": 0.2, "maybe": 0.4}
"""What an answer adds to the probability of a thumb up."""
SEVERE, KIND = 0.05, 0.55
"""The probability of a thumb up for "yes", of the users of odd and of even questions."""
QUESTIONS = PROMPTS[:20]
SHARE_SCORED, SHARE_WRONG, LONGEST_DELAY = 0.3, 0.1, 5
BATCH = 120


@dataclass
class Answer:
    """What a client has of an answer."""

    id: str
    likes: float
    """The probability of a thumb up."""


def likes(question: int, text: str) -> float:
    word = text.strip().strip(".!\"'").lower()
    return (SEVERE if question % 2 else KIND) + LIKED[word] if word in LIKED else 0.0


async def ask(http: httpx.AsyncClient, name: str, question: int) -> Answer:
    messages = [{"role": "user", "content": QUESTIONS[question]}]
    reply = await http.post("/v1/chat/completions", json={"model": name, "messages": messages, "max_tokens": 8})
    reply.raise_for_status()
    answer = reply.json()
    return Answer(answer["id"], likes(question, answer["choices"][0]["message"]["content"] or ""))


async def give(http: httpx.AsyncClient, name: str, scores: Sequence[tuple[Answer, bool, str]]) -> None:
    """Sends thumbs, each with its user."""
    for answer, thumb, user in scores:
        body = {"answer": answer.id, "value": thumb, "user": user}
        (await http.post(f"/api/models/{name}/feedback", json=body)).raise_for_status()


async def use(http: httpx.AsyncClient, name: str, flags_steps: int, seed: int) -> list[float]:
    """Rounds of questions and late thumbs until the model is at a step. Returns the expected share of thumbs up of each round."""
    dice = random.Random(seed)
    due: dict[int, list[tuple[Answer, bool, str]]] = {}
    rewards: list[float] = []
    while True:
        number = len(rewards)
        answers = await asyncio.gather(*(ask(http, name, question % 20) for question in range(20 * 20)))
        rewards.append(statistics.fmean(answer.likes for answer in answers))
        for answer in answers:
            if dice.random() < SHARE_SCORED:
                is_wrong = dice.random() < SHARE_WRONG
                thumb = (dice.random() < answer.likes) != is_wrong
                score = (answer, thumb, f"user-{dice.randrange(200)}")
                due.setdefault(number + dice.randint(0, LONGEST_DELAY), []).append(score)
        await give(http, name, due.pop(number, []))
        info = (await http.get(f"/api/models/{name}/learning")).json()
        print(
            f"round {number:2d}  expected thumbs up {rewards[-1]:.3f}  step {info['serving_step']} serves; {info['reason']}"
        )
        if info["serving_step"] >= flags_steps:
            return rewards


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 6, {"art/tiny": 4e-3, "smollm2": 5e-4})
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(steps=10)
    flags = parser.parse_args()
    async with make_backend(flags) as backend:
        model = make_model(flags, "serve-and-learn")
        await model.register(backend)
        rate = flags.learning_rate or flags.learning_rates.get(flags.model, 1e-4)
        config = default_config().model_copy(update={"learning_rate": rate})
        await model.learn(Policy(batch=BATCH, config=config))
        headers = {"authorization": f"Bearer {model.inference_api_key}"} if model.inference_api_key else {}
        async with httpx.AsyncClient(base_url=backend.base_url, headers=headers, timeout=600) as http:
            rewards = await use(http, model.get_inference_name(), flags.steps, flags.seed)
    plot({"expected thumbs up": rewards}, flags.plot, "learning from thumbs")


if __name__ == "__main__":
    asyncio.run(main())
