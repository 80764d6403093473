"""Words, sentences and facts from which the synthetic chats are drawn.

Invented words are divided by their checksum: one in ten is held out, so that copying is measured on words that are in no
training chat.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]  # Any: the type of a value depends on its key
"""A chat message in OpenAI's form; its values are strings, None or lists of tool calls."""


class Rng(random.Random):
    """A seeded random source. With `held_out` only held-out invented words are drawn, otherwise only the others."""

    held_out: bool = False


def make_rng(seed: str, held_out: bool = False) -> Rng:
    """A random source whose draws depend only on the seed."""
    rng = Rng(seed)
    rng.held_out = held_out
    return rng


def listed(words: str) -> list[str]:
    """The words of a text, as a list."""
    return words.split()


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep it short.",
    "You are an agent.",
    "You are a careful helper that follows instructions.",
    "Be brief.",
    "Answer the user.",
    "You are a small language model.",
    "You help people with their work.",
    "You are an assistant for a company. Be polite and correct.",
    "Use the tools when they help. Otherwise answer yourself.",
)

FIRST_NAMES = listed(
    "Anna Ben Carla David Emma Felix Grace Henry Iris James Kate Leo Maria Nina Oscar Paul Rosa Sam "
    "Tom Uma Victor Wendy Alice Bob Carol Daniel Ella Frank George Hannah Jack Lucy Martin Olivia"
)

CITIES = [
    *listed(
        "Paris London Berlin Rome Madrid Vienna Oslo Cairo Tokyo Delhi Lima Boston Chicago Dallas Denver "
        "Seattle Austin Miami Toronto Sydney Athens Dublin Lisbon Prague Warsaw Zurich Munich Hamburg "
        "Milan Naples Seoul Bangkok Jakarta Nairobi Lagos Moscow Istanbul"
    ),
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Zürich",
    "Köln",
    "São Paulo",
    "Malmö",
]

WORDS = listed(
    "apple bread river stone green small quick paper music garden window table summer winter book "
    "light water house train forest mountain blue red old new early price list report order ticket "
    "best cheap fresh open simple history science travel weather recipe camera phone city road horse "
    "bird fish cat dog flower coffee tea sugar salt plan team market school letter number story game "
    "film song team ship plane bridge tower cloud rain snow wind sun moon star night morning"
)

SENTENCES = (
    "The sun rises in the east and sets in the west.",
    "She put the book on the table and closed the window.",
    "We walked along the river until it was dark.",
    "Water turns into ice when it gets cold enough.",
    "The train leaves at noon and arrives in the evening.",
    "He opened the door and found an old letter.",
    "A good tool makes hard work easy.",
    "They planted three trees behind the house.",
    "My brother plays music every morning.",
    "The cat sleeps on the chair near the fire.",
    "Most birds can fly, but some of them only run.",
    "It was raining, so the children stayed inside.",
    "You can find the report on the second page.",
    "The market opens early and closes late.",
    "Bread is made from flour, water and salt.",
    "The moon goes around the earth in a month.",
    "Our team finished the work before the end of the week.",
    "Please write your name at the top of the paper.",
    "There are many ways to solve this problem.",
    "The mountain was covered with snow for half of the year.",
    "I would like to know what happened after that.",
    "When the wind is strong, the boats stay at home.",
    "People often forget what they have learned.",
    "The teacher asked a question and nobody answered.",
    "A small ship crossed the sea in nine days.",
    "This city is known for its bridges and its coffee.",
    "He could not remember where he had left his phone.",
    "The farmer sold his horse and bought a new plough.",
    "Every story needs a beginning and an end.",
    "The price of bread went up again last year.",
    "They were talking about the weather and their friends.",
    "If you are tired, you should rest for a while.",
)

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Russia": "Moscow",
    "England": "London",
}

COLORS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "the sun": "yellow",
    "coal": "black",
    "a carrot": "orange",
    "the sea": "blue",
    "milk": "white",
}

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "new",
    "early": "late",
    "open": "closed",
    "up": "down",
    "left": "right",
    "light": "dark",
    "fast": "slow",
    "good": "bad",
    "long": "short",
    "hard": "easy",
}

_ONSETS = listed("b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh st t tr v w x y z")
_VOWELS = listed("a e i o u ai ea ee ia io oo ou")
_CODAS = ["", "", "", *listed("b ck d g l ll m n nd ng p r rk s st t th x")]


def rare_word(rng: Rng) -> str:
    """An invented lower-case word of one to three syllables."""
    while True:
        syllables = rng.choices((1, 2, 3), (2, 5, 3))[0]
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
        if (zlib.crc32(word.encode()) % 10 == 0) == rng.held_out:
            return word


def known_or_rare(rng: Rng, known: Sequence[str]) -> str:
    """A word of the list or an invented one with a capital; always invented where held out."""
    if not rng.held_out and rng.random() < 0.4:
        return rng.choice(known)
    return rare_word(rng).capitalize()


def plain_word(rng: Rng) -> str:
    """A common lower-case word or an invented one; always invented where held out."""
    if not rng.held_out and rng.random() < 0.5:
        return rng.choice(WORDS)
    return rare_word(rng)


def phrase(rng: Rng, most: int = 4) -> str:
    """One to `most` lower-case words."""
    return " ".join(plain_word(rng) for _ in range(rng.randint(1, most)))


def whole_number(rng: Rng) -> int:
    """An integer. Small ones are more frequent, and some are negative."""
    value = rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 3, 4, 5)))
    return -value if rng.random() < 0.05 else value


def code(rng: Rng) -> str:
    """An identifier such as "QX-204", "TRN" or "a7f3"."""
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
    mixed = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 8)))
    return rng.choice((letters, letters, f"{letters}-{digits}", f"{letters}{digits}", mixed))


def system_turn(rng: Rng, share: float = 0.4) -> list[Message]:
    """A general system prompt as a list of one message, or an empty list."""
    if rng.random() > share:
        return []
    name = known_or_rare(rng, FIRST_NAMES)
    content = rng.choice(
        (
            *SYSTEM_PROMPTS,
            f"You are {name}, an assistant for {plain_word(rng)} {plain_word(rng)}.",
            f'You are an agent. Your name is "{name}". You help with {phrase(rng)}.',
            f"{rng.choice(SYSTEM_PROMPTS)} {rng.choice(SENTENCES)}",
            f"{rng.choice(SYSTEM_PROMPTS)}\n\n{rng.choice(SENTENCES)}\n- {phrase(rng)}\n- {phrase(rng)}",
        )
    )
    return [{"role": "system", "content": content}]


def turns(question: str, answer: str, thought: str | None = None) -> list[Message]:
    """A user turn and the assistant's answer, with a thought if there is one."""
    answer_turn: Message = {"role": "assistant", "content": answer}
    if thought is not None:
        answer_turn["reasoning_content"] = thought
    return [{"role": "user", "content": question}, answer_turn]
