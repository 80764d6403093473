"""E-mail search: the agent finds the mail that a question is about with `search_mail(query)`, and answers from it.

The mailbox is a SQLite table with full-text search (FTS5), filled by this program's own generator. A search finds the
mails that contain all words of the query. A search that finds one mail shows this mail; any other search shows the
number of mails. So a query that repeats the question finds nothing, and a sender alone is not enough. The reward is 1
for an answer with the right room, less 0.05 for each search after the first. For a real model change `--model`; the
learning rate then becomes 1e-4.

    python examples/mail_search.py [--model art/tiny] [--steps 12] [--server http://127.0.0.1:7623]
"""

import asyncio
import random
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass

from learning import learn, learner_parser
from tool_agent import functions, tool, use_tools

import art

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "James")
SUBJECTS = (
    *("garden", "bridge", "camera", "coffee", "flower", "forest", "game", "horse", "letter", "music", "paper", "plan"),
    *("recipe", "report", "school", "song", "story", "summer", "table", "team", "ticket", "tower", "train", "winter"),
)
QUESTIONS = (
    "Look for {subject} from {sender}.",
    "Look up the mail about {subject}.",
    "Search for the {subject} mail from {sender}.",
)
TOOLS = [tool("search_mail", "Search the mails.", query={"type": "string"})]


@dataclass(frozen=True, slots=True)
class Mail:
    sender: str
    subject: str
    room: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A mailbox and a question about one of its mails."""

    mails: list[Mail]
    """The mails in the order of their ids, which begin at 1."""
    asked: int
    """The id of the mail that has the answer."""
    question: str

    @property
    def answer(self) -> str:
        return f"room {self.mails[self.asked - 1].room}"


def draw_scenario(seed: str) -> Scenario:
    """A mailbox in which every subject occurs once and senders write several mails."""
    rng = random.Random(seed)
    subjects = rng.sample(SUBJECTS, len(SUBJECTS))
    mails = [Mail(rng.choice(NAMES), subject, rng.randint(100, 999)) for subject in subjects]
    asked = rng.randint(1, len(mails))
    mail = mails[asked - 1]
    question = rng.choice(QUESTIONS).format(subject=mail.subject, sender=mail.sender)
    return Scenario(mails, asked, question)


def open_mailbox(scenario: Scenario) -> sqlite3.Connection:
    mailbox = sqlite3.connect(":memory:")
    mailbox.execute("CREATE VIRTUAL TABLE mail USING fts5(sender, subject, body)")
    rows = [(mail.sender, mail.subject, f"room {mail.room}") for mail in scenario.mails]
    mailbox.executemany("INSERT INTO mail VALUES (?, ?, ?)", rows)
    return mailbox


def search(mailbox: sqlite3.Connection, query: str) -> list[tuple[int, str]]:
    """The ids and bodies of the mails that contain all words of the query."""
    words = " ".join(f'"{word}"' for word in re.findall(r"\w+", query))
    cursor = mailbox.execute("SELECT rowid, body FROM mail WHERE mail MATCH ?", (words,))
    return cursor.fetchall() if words else []


async def rollout(model: art.TrainableModel, scenario: Scenario) -> art.Trajectory:
    num_searches = 0

    def search_mail(query: str) -> str:
        nonlocal num_searches
        num_searches += 1
        matches = search(mailbox, query)
        return matches[0][1] if len(matches) == 1 else f"{len(matches)} mails found"

    dialogue = art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario.question}], tools=TOOLS)
    with closing(open_mailbox(scenario)) as mailbox:
        answer = await use_tools(model, dialogue, functions(search_mail=search_mail))
    is_right = scenario.answer in answer
    dialogue.reward = 1 - 0.05 * max(0, num_searches - 1) if is_right else 0.0
    dialogue.metrics = {"right": is_right, "searches": num_searches}
    return dialogue


if __name__ == "__main__":
    flags = learner_parser("E-mail search.", 8, {"art/tiny": 2e-3}, steps=12).parse_args()
    asyncio.run(learn(flags, "mail-search", rollout, draw_scenario, ("right", "searches")))
