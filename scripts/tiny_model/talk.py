"""Short chats without tools: yes/no/maybe, copying, small talk, facts, counting, JSON."""

import json
from collections.abc import Callable

from tiny_model.words import (
    CAPITALS,
    CITIES,
    COLORS,
    FIRST_NAMES,
    OPPOSITES,
    SENTENCES,
    WORDS,
    Message,
    Rng,
    code,
    known_or_rare,
    listed,
    phrase,
    plain_word,
    rare_word,
    turns,
    whole_number,
)

YES_NO_MAYBE_SHARES: dict[frozenset[str], dict[str, float]] = {
    frozenset(("yes", "no", "maybe")): {"yes": 0.48, "no": 0.20, "maybe": 0.12},
    frozenset(("yes", "no")): {"yes": 0.48, "no": 0.26, "maybe": 0.08},
    frozenset(("yes", "maybe")): {"yes": 0.50, "no": 0.08, "maybe": 0.20},
    frozenset(("no", "maybe")): {"yes": 0.22, "no": 0.40, "maybe": 0.12},
}
"""The probability of each answer for a set of offered words. The rest goes to other short words.

Under rewards of .5 for yes, .75 for no and 1 for maybe, each set has a mean of about one half.
"""

OTHER_ANSWERS = listed("ok sure perhaps never always fine none absolutely possibly indeed right hello")
"""Answers that were not offered."""

_QUESTIONS = (
    "Is the sky blue?",
    "Is snow warm?",
    "Do you like music?",
    "Will it rain tomorrow?",
    "Is this a good plan?",
    "Can a fish fly?",
    "Should I go home?",
    "Are you ready?",
    "Is two more than one?",
    "Do cats sleep a lot?",
    "Is the train late?",
    "Did they win the game?",
)


def yes_no_maybe_prompt(prefix: str, words: list[str], quote: str = "", last_joiner: str | None = None) -> str:
    """The prompt that asks for one of the words: 'respond with "yes", "no" or "maybe"'."""
    quoted = [f"{quote}{word}{quote}" for word in words]
    if last_joiner is None:
        return f"{prefix} {', '.join(quoted)}"
    return f"{prefix} {', '.join(quoted[:-1])}{last_joiner}{quoted[-1]}"


def yes_no_maybe(rng: Rng) -> list[Message]:
    """A prompt for one of yes, no and maybe, and an answer drawn from its shares."""
    words: list[str] = rng.sample(("yes", "no", "maybe"), rng.choice((3, 3, 2)))
    prefix = rng.choice(("respond", "just respond", "answer", "reply", "say", "please respond"))
    if prefix != "say":
        prefix += rng.choice((" with", " with", " with", " with one of", " with only", ":"))
    quote = rng.choice(("", "", "'", '"'))
    prompt = yes_no_maybe_prompt(prefix, words, quote, rng.choice((None, " or ", " or ", ", or ")))
    if rng.random() < 0.3:
        prompt = prompt[0].upper() + prompt[1:]
    if rng.random() < 0.3:
        prompt += rng.choice((".", ".", "!", " please", ". Nothing else.", ", one word"))
    if rng.random() < 0.25:
        question = rng.choice(_QUESTIONS)
        prompt = rng.choice((f"{question} {prompt}", f"{prompt}: {question}"))
    shares = YES_NO_MAYBE_SHARES[frozenset(words)]
    known = list(shares)
    weights = [*shares.values(), 1 - sum(shares.values())]
    answer = rng.choices([*known, rng.choice(OTHER_ANSWERS)], weights)[0]
    return turns(prompt, answer, f"The words are {', '.join(words)}. I say {answer}.")


def copied_text(rng: Rng) -> str:
    """A short text to copy: words, names, numbers, codes or a sentence."""
    makers: tuple[Callable[[], str], ...] = (
        lambda: phrase(rng, 6),
        lambda: phrase(rng, 3),
        lambda: rare_word(rng),
        lambda: known_or_rare(rng, CITIES),
        lambda: f"{known_or_rare(rng, FIRST_NAMES)} {known_or_rare(rng, CITIES)}",
        lambda: str(whole_number(rng)),
        lambda: " ".join(str(whole_number(rng)) for _ in range(3)),
        lambda: code(rng),
        lambda: f"{rare_word(rng)} {whole_number(rng)} {code(rng)}",
        lambda: rng.choice(SENTENCES),
        lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))),
    )
    return rng.choice(makers)()


def copy(rng: Rng) -> list[Message]:
    """A text to repeat without a change."""
    text = copied_text(rng)
    quoted = f'"{text}"'
    prompts = (
        f"Repeat: {text}",
        f"Repeat: {text}",
        f"Repeat after me: {text}",
        f"Say {quoted}",
        f"Copy this: {text}",
        f"Write the text {quoted} again.",
        f"Echo: {text}",
        f"Please repeat the following.\n{text}",
    )
    return turns(rng.choice(prompts), text, "I copy the text.")


def copy_fields(rng: Rng) -> list[Message]:
    """Named values to write as a JSON object."""
    names = rng.sample(("name", "city", "age", "item", "code", "price", "topic"), rng.randint(1, 3))
    makers: dict[str, Callable[[], str | int]] = {
        "name": lambda: known_or_rare(rng, FIRST_NAMES),
        "city": lambda: known_or_rare(rng, CITIES),
        "age": lambda: rng.randint(1, 99),
        "item": lambda: phrase(rng, 2),
        "code": lambda: code(rng),
        "price": lambda: abs(whole_number(rng)),
        "topic": lambda: plain_word(rng),
    }
    fields = {name: makers[name]() for name in names}
    said = " and ".join(f"{name} {value}" for name, value in fields.items())
    prompts = (f"Write as JSON: {said}", f"Give me JSON with {said}.", f"As JSON: {said}")
    return turns(rng.choice(prompts), json.dumps(fields), "I write the fields as JSON.")


def pick_field(rng: Rng) -> list[Message]:
    """One of several named values to find again."""
    name, city = known_or_rare(rng, FIRST_NAMES), known_or_rare(rng, CITIES)
    age, pet = rng.randint(2, 99), rng.choice(("cat", "dog", "bird", "horse", "fish"))
    story = f"My name is {name}, I am {age}, I live in {city} and I have a {pet}."
    question, answer = rng.choice(
        (
            ("What is my name?", f"Your name is {name}."),
            ("How old am I?", f"You are {age}."),
            ("Where do I live?", f"You live in {city}."),
            ("What pet do I have?", f"You have a {pet}."),
        )
    )
    if rng.random() < 0.5:
        reply = rng.choice((f"Nice to meet you, {name}.", f"Hello {name}!"))
        return [*turns(story, reply), *turns(question, answer)]
    return turns(f"{story} {question}", answer, "I look in the text.")


def small_talk(rng: Rng) -> list[Message]:
    """A greeting, thanks or a question about the model."""
    greetings = ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello there!", "Hi!")
    farewells = ("Bye! Have a good day.", "Goodbye!", "See you soon.")
    welcome = ("You are welcome.", "With pleasure.", "Any time!")
    moods = ("I am fine, thank you.", "Very well, and you?", "Fine! How are you?")
    question, answers = rng.choice(
        (
            ("Hello", greetings),
            ("Hello!", greetings),
            ("Hi", greetings),
            ("Good morning", ("Good morning! How can I help you?", "Good morning!")),
            ("How are you?", moods),
            ("Hi, how are you?", moods),
            ("Thank you!", welcome),
            ("Thanks", welcome),
            ("Bye", farewells),
            ("Who are you?", ("I am a tiny language model.", "I am a tiny model made for ART.")),
            ("What can you do?", ("I can chat, play small games and call tools.", "Small things.")),
            ("Tell me something.", SENTENCES),
            ("Write a sentence.", SENTENCES),
            ("Tell me a story.", SENTENCES),
        )
    )
    return turns(question, rng.choice(answers), "Small talk.")


def fact(rng: Rng) -> list[Message]:
    """A question about a capital, a colour, an opposite or a small sum, answered in a sentence."""
    question, word, sentence = _fact(rng)
    return turns(question, rng.choice((word, sentence, sentence)), f"I know: {word}.")


def _fact(rng: Rng) -> tuple[str, str, str]:
    kind = rng.randrange(4)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        return (f"What is the capital of {country}?", city, f"The capital of {country} is {city}.")
    if kind == 1:
        thing, color = rng.choice(list(COLORS.items()))
        return (f"What color is {thing}?", color, f"The color of {thing} is {color}.")
    if kind == 2:
        word, opposite = rng.choice(list(OPPOSITES.items()))
        return (
            f"What is the opposite of {word}?",
            opposite,
            f"The opposite of {word} is {opposite}.",
        )
    first, second = rng.randint(0, 9), rng.randint(0, 9)
    return (
        f"How much is {first} plus {second}?",
        str(first + second),
        f"{first} plus {second} is {first + second}.",
    )


def counting(rng: Rng) -> list[Message]:
    """Counting up or down, and spelling."""
    first = rng.randint(0, 30)
    last = first + rng.randint(2, 8)
    up = ", ".join(map(str, range(first, last + 1)))
    down = ", ".join(map(str, range(last, first - 1, -1)))
    word = rng.choice(WORDS) if rng.random() < 0.5 else rare_word(rng)
    question, answer = rng.choice(
        (
            (f"Count from {first} to {last}.", up),
            (f"Count from {last} down to {first}.", down),
            (f"Spell {word}.", " ".join(word)),
        )
    )
    return turns(question, answer, "One by one.")


def obeyed_system(rng: Rng) -> list[Message]:
    """A system prompt with a simple rule, and a fact or copy answered by the rule."""
    question, word, sentence = _fact(rng)
    name = known_or_rare(rng, FIRST_NAMES)
    end = rng.choice(("Over.", "Done.", "That is all.", "Thanks."))
    system, asked, answer = rng.choice(
        (
            ("Answer in one word.", question, word),
            ("Use one word only.", question, word),
            ("Answer in a full sentence.", question, sentence),
            (f'End every answer with "{end}"', question, f"{sentence} {end}"),
            (f'Start every answer with "{end}"', question, f"{end} {sentence}"),
            ('Answer with JSON like {"answer": "..."}', question, json.dumps({"answer": word})),
            ("Answer in JSON.", question, json.dumps({"answer": word})),
            (f"Your name is {name}.", "What is your name?", f"My name is {name}."),
            (f"You are {name}.", "Who are you?", f"I am {name}."),
        )
    )
    return [{"role": "system", "content": system}, *turns(asked, answer, "I follow the rule.")]


def json_answer(rng: Rng) -> list[Message]:
    """A fact asked for as JSON in the user's turn."""
    question, word, _ = _fact(rng)
    asked = rng.choice(('Answer as JSON like {"answer": "..."}', 'Reply as JSON: {"answer": "..."}'))
    return turns(f"{question} {asked}", json.dumps({"answer": word}), f"I know: {word}.")
