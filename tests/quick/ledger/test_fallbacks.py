"""Scripted agents with several speakers, and which answers a reader of their conversations would train.

Each agent is a list of requests: the model ("a" is trained, "b" is another model of the server, "base" its base model), the
conversation, and the answer. In a conversation `|` divides messages: `=` begins an assistant's, `#` the system's, `@` a
tool's, all others are the user's. An assistant's message that no request of the list has as its answer was written elsewhere,
by a model of another server or by the program. `trained` are the answers of "a" that earned the reward, `of_b` those of "b".
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from art_server.ledger.speakers import ASKED_ANOTHER, REPLACED
from art_server.shared import clock
from tests.quick.ledger.scripted_agent import Agent, answers

ROLES = {"=": "assistant", "#": "system", "@": "tool"}


@dataclass(frozen=True)
class Ask:
    model: str
    conversation: str
    answer: str
    at_once: bool = False
    """The request was sent before the answer of the one before it came."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `Agent.ask`."""


@dataclass(frozen=True)
class Script:
    title: str
    asks: list[Ask]
    trained: list[str]
    of_b: list[str] | None = None
    reason: str | None = None
    """Why the others are left out; None: any reason."""


def a(conversation: str, answer: str, at_once: bool = False, **options: Any) -> Ask:
    return Ask("a", conversation, answer, at_once, options)


def b(conversation: str, answer: str, at_once: bool = False, **options: Any) -> Ask:
    return Ask("b", conversation, answer, at_once, options)


def base(conversation: str, answer: str) -> Ask:
    return Ask("base", conversation, answer)


def messages(conversation: str) -> list[dict[str, Any]]:
    parts = [part.strip() for part in conversation.split("|")]
    return [
        {"role": ROLES[part[0]], "content": part[1:]} if part[0] in ROLES else {"role": "user", "content": part}
        for part in parts
    ]


SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "Answer"}}}
LABELS = {"structured_outputs": {"choice": ["math", "code"]}}
PLAIN = {"text": {"format": {"type": "text"}}}
LOOK = [{"type": "function", "function": {"name": "look"}}]
PLAN = "First I look for the file, then I read its last lines, and at the end I count them."

DISCARDED = [
    Script(
        "fallback to a model elsewhere, and on",
        [a("q", "sorry, {not json"), a('q | ={"a": 1} | go on', "done")],
        ["done"],
        reason=REPLACED,
    ),
    Script(
        "fallback to a model of the server, and on",
        [a("q", "sorry, {not json"), b("q", '{"a": 1}'), a('q | ={"a": 1} | go on', "done")],
        ["done"],
        of_b=['{"a": 1}'],
        reason=REPLACED,
    ),
    Script(
        "fallback as the last turn: no request follows",
        [a("q", "hello"), a("q | =hello | and?", "{broken"), b("q | =hello | and?", "fine")],
        ["hello"],
        of_b=["fine"],
        reason=ASKED_ANOTHER,
    ),
    Script(
        "fallback as the only turn",
        [a("q", "{broken"), b("q", "fine")],
        [],
        of_b=["fine"],
        reason=ASKED_ANOTHER,
    ),
    Script(
        "fallback to the base model as the last turn",
        [a("q", "hello"), a("q | =hello | and?", "{broken"), base("q | =hello | and?", "fine")],
        ["hello"],
        reason=ASKED_ANOTHER,
    ),
    Script(
        "fallback at every turn",
        [
            a("q", "{one"),
            b("q", "first"),
            a("q | =first | r", "{two"),
            b("q | =first | r", "second"),
            a("q | =first | r | =second | s", "third"),
        ],
        ["third"],
        of_b=["first", "second"],
    ),
    Script(
        "fallback at every turn, and the last one too",
        [a("q", "{one"), b("q", "first"), a("q | =first | r", "{two"), b("q | =first | r", "second")],
        [],
        of_b=["first", "second"],
    ),
    Script(
        "a model that answers well between two fallbacks",
        [
            a("q", "{one"),
            b("q", "first"),
            a("q | =first | r", "good"),
            a("q | =first | r | =good | s", "{three"),
            b("q | =first | r | =good | s", "third"),
        ],
        ["good"],
        of_b=["first", "third"],
    ),
    Script(
        "two retries of the same model, then a fallback elsewhere",
        [a("q", "{one"), a("q", "{two"), a("q | =fine | go on", "done")],
        ["done"],
    ),
    Script(
        "an expert takes over in the middle",
        [a("q", "hello"), a("q | =hello | hard", "no idea"), a("q | =hello | hard | =it is 17 | next", "ok")],
        ["hello", "ok"],
        reason=REPLACED,
    ),
    Script(
        "an expert of the server takes over for good",
        [
            a("q", "hello"),
            a("q | =hello | hard", "no idea"),
            b("q | =hello | hard", "17"),
            b("q | =hello | hard | =17 | s", "18"),
        ],
        ["hello"],
        of_b=["17", "18"],
    ),
    Script(
        "another expert goes on with a foreign expert's answer",
        [a("q", "no idea"), b("q | =it is 17 | next", "18")],
        [],
        of_b=["18"],
        reason=REPLACED,
    ),
    Script(
        "the program answers in the policy's place (a repair by hand)",
        [a("q", "rm -rf /"), a("q | =I cannot do that. | go on", "sorry")],
        ["sorry"],
        reason=REPLACED,
    ),
    Script(
        "an illegal move is replaced by a legal one",
        [a("board 1", "e2e9"), a("board 1 | =d2d4 | board 2", "g1f3")],
        ["g1f3"],
        reason=REPLACED,
    ),
    Script(
        "an empty answer is replaced",
        [a("q", ""), a("q | =fine | go on", "done")],
        ["done"],
        reason=REPLACED,
    ),
    Script(
        "a router that asks two models at once, and goes on with the other's answer",
        [a("q", "mine"), b("q", "theirs", at_once=True), a("q | =theirs | go on", "done")],
        ["done"],
        of_b=["theirs"],
        reason=REPLACED,
    ),
    Script(
        "a fallback that repairs: the other model is shown the bad answer",
        [a("q", "{bad"), b("q | ={bad | that is no JSON", '{"x": 7}'), a('q | ={"x": 7} | go on', "done")],
        ["done"],
        of_b=['{"x": 7}'],
        reason=REPLACED,
    ),
    Script(
        "a fallback with a schema, elsewhere",
        [a("q", '{"kind": "cat"}', constraints=SCHEMA), a('q | ={"type": "dog"} | go on', "done", constraints=SCHEMA)],
        ["done"],
        reason=REPLACED,
    ),
    Script(
        "an expert of the server whose answer differs in one character",
        [a("q", '{"answer": 12}'), b("q", '{"answer": 13}'), a('q | ={"answer": 13} | go on', "done")],
        ["done"],
        of_b=['{"answer": 13}'],
        reason=REPLACED,
    ),
    Script(
        "the same with both models asked at once",
        [a("q", '{"answer": 12}'), b("q", '{"answer": 13}', at_once=True), a('q | ={"answer": 13} | go on', "done")],
        ["done"],
        of_b=['{"answer": 13}'],
        reason=REPLACED,
    ),
    Script(
        "a format that constrains nothing",
        [a("q", "{bad", constraints=PLAIN), a("q | =fine | go on", "done", constraints=PLAIN)],
        ["done"],
    ),
    Script(
        "the answer that was replaced stands in the question, too",
        [a("say yes or no", "yes"), b("say yes or no", "no"), a("say yes or no | =no | go on", "done")],
        ["done"],
        of_b=["no"],
    ),
    Script(
        "of several branches the agent goes on with an expert's answer",
        [a("q", "left"), a("q", "right", at_once=True), a("q | =centre | go on", "done")],
        ["done"],
        reason=REPLACED,
    ),
    Script(
        "a retry with a hint, which the history does not show",
        [a("q", "{bad"), a("q | answer in JSON", '{"x": 7}'), a('q | ={"x": 7} | go on', "done")],
        ['{"x": 7}', "done"],
        reason=REPLACED,
    ),
    Script(
        "an agent that begins again, and had edited its first answer",
        [a("q", "one, two"), a("q | =one, two! | r", "end"), a("q", "other"), a("q | =other | r", "end 2")],
        ["other", "end 2"],
    ),
]

USED = [
    Script(
        "a repair that changes one character is an edit",
        [
            a("q", '{"name" "Paris", "population": 2102650}'),
            a('q | ={"name": "Paris", "population": 2102650} | on', "done"),
        ],
        ['{"name" "Paris", "population": 2102650}', "done"],
    ),
    Script(
        "a spelling mistake is mended",
        [a("q", "Pariis"), a("q | =Paris | on", "done")],
        ["Pariis", "done"],
    ),
    Script(
        "single quotes become double ones, and a trailing comma goes",
        [a("q", "{'a': 1, 'b': 2,}"), a('q | ={"a": 1, "b": 2} | on', "done")],
        ["{'a': 1, 'b': 2,}", "done"],
    ),
    Script(
        "an agent that keeps the answer's last line",
        [a("q", "3 and 4 are 7.\nThe answer is 7"), a("q | =7 | on", "done")],
        ["3 and 4 are 7.\nThe answer is 7", "done"],
    ),
    Script(
        "an agent that removes the fence around JSON",
        [a("q", 'Sure!\n```json\n{"a": "one"}\n```'), a('q | ={"a": "one"} | on', "done")],
        ['Sure!\n```json\n{"a": "one"}\n```', "done"],
    ),
    Script(
        "an agent that adds what its tool said",
        [a("q", "look()"), a("q | =look() -> a long list of files | on", "done")],
        ["look()", "done"],
    ),
    Script(
        "an agent that adds its stop string, which the next request does not name",
        [a("q", "<code>look()", stops=["</code>"]), a("q | =<code>look()</code> | on", "done")],
        ["<code>look()", "done"],
    ),
    Script(
        "an agent that strips white space",
        [a("q", "\n\n one  two \n"), a("q | =one two | on", "done")],
        ["\n\n one  two \n", "done"],
    ),
    Script(
        "an agent that removes thinking, and mends the rest",
        [a("q", "<think>long thoughts about it</think>Pariis it is"), a("q | =Paris it is | on", "done")],
        ["<think>long thoughts about it</think>Pariis it is", "done"],
    ),
    Script(
        "an agent that empties earlier answers",
        [a("q", "a long answer"), Ask("a", "q | = | on", "done")],
        ["a long answer", "done"],
    ),
    Script(
        "an agent that joins a cut answer and its continuation",
        [a("q", "one, two,"), a("q | =one, two, | continue", "three"), a("q | =one, two, three | on", "done")],
        ["one, two,", "three", "done"],
    ),
    Script(
        "an agent that rewrites some words of a long answer",
        [a("q", PLAN), a("q | =" + PLAN.replace("file", "document").replace("end", "finish") + " | on", "done")],
        [PLAN, "done"],
    ),
    Script(
        "sub-agents of two models with tasks of their own",
        [a("q", "plan"), b("# sub | task", "part"), a("q | =plan | part", "done"), a("# sub | other", "part 2")],
        ["plan", "done", "part 2"],
        of_b=["part"],
    ),
    Script(
        "a sub-agent gets an example that was never an answer",
        [a("# s | 2 + 2", "4"), a("# s | 1 + 1 | =two | 2 + 2", "four")],
        ["4", "four"],
    ),
    Script(
        "an example of every request: the question was asked after it",
        [a("1 + 1 | =two | 2 + 2", "four"), a("1 + 1", "2"), a("1 + 1 | =two | 3 + 3", "six")],
        ["four", "2", "six"],
    ),
    Script(
        "best of n, of one request after the other with other words",
        [a("q (attempt 1)", "x"), a("q (attempt 2)", "y"), a("which? x or y", "y")],
        ["x", "y", "y"],
    ),
    Script(
        "parallel branches that all go on",
        [a("q", "l"), a("q", "r", at_once=True), a("q | =l | u", "l2"), a("q | =r | u", "r2")],
        ["l", "l2", "r", "r2"],
    ),
    Script(
        "tree search: both thoughts go on, and the evaluator sees them",
        [
            a("q", "go west"),
            a("q", "go east", at_once=True),
            b("rate: go west", "3"),
            b("rate: go east", "8"),
            a("q | =go west\nthen north | u", "w"),
            a("q | =go east\nthen south | u", "e"),
        ],
        ["go west", "go east", "w", "e"],
        of_b=["3", "8"],
    ),
    Script(
        "a critic of the server reads each candidate in turn",
        [
            a("q", "left"),
            a("q", "right", at_once=True),
            b("q | =left | critique", "bad"),
            b("q | =right | critique", "good"),
        ],
        ["left", "right"],
        of_b=["bad", "good"],
    ),
    Script(
        "a summary takes the place of a history that had gone on",
        [
            a("q", "look"),
            a("q | =look | @r", "read"),
            a("q | =look | @r | =read | @s", "count"),
            a("q | =So far: 3 files. | on", "end"),
        ],
        ["look", "read", "count", "end"],
    ),
    Script(
        "a summary that the policy made of its only answer",
        [a("q", "a very long answer"), a("summarise: a very long answer", "short"), a("q | =short | on", "end")],
        ["a very long answer", "short", "end"],
    ),
    Script(
        "draft, critique and refinement of each turn",
        [
            a("q", "draft one"),
            a("criticise: draft one", "too short"),
            a("refine draft one by: too short", "better text"),
            a("q | =better text | on", "draft two"),
        ],
        ["draft one", "too short", "better text", "draft two"],
    ),
    Script(
        "two models take turns in one conversation",
        [
            a("q", "a1"),
            b("q | =a1 | u", "b1"),
            a("q | =a1 | u | =b1 | v", "a2"),
            b("q | =a1 | u | =b1 | v | =a2 | w", "b2"),
        ],
        ["a1", "a2"],
        of_b=["b1", "b2"],
    ),
    Script(
        "a game: each player has its own conversation",
        [
            a("move", "rock"),
            b("move", "paper"),
            a("move | =rock | the other: paper", "stone"),
            b("move | =paper | the other: rock", "sheet"),
        ],
        ["rock", "stone"],
        of_b=["paper", "sheet"],
    ),
    Script(
        "a game whose players moved alike",
        [a("move", "rock"), b("move", "rock"), a("move | =rock | draw", "paper"), b("move | =rock | draw", "stone")],
        ["rock", "paper"],
        of_b=["rock", "stone"],
    ),
    Script(
        "a game without history, in which a move repeats the other's",
        [a("your move", "rock"), b("rock", "rock"), a("rock", "paper")],
        ["rock", "paper"],
        of_b=["rock"],
    ),
    Script(
        "a debate in which one side speaks last",
        [a("q", "yes, because"), b("q", "no, since"), a("q | =yes, because | B says: no, since", "still yes")],
        ["yes, because", "still yes"],
        of_b=["no, since"],
    ),
    Script(
        "a mixture of agents: the policy reads all answers",
        [a("q", "seven"), b("q", "eight"), a("answers: seven; eight. Which?", "seven it is")],
        ["seven", "seven it is"],
        of_b=["eight"],
    ),
    Script(
        "a mixture whose aggregate takes the answers' place",
        [a("q", "seven"), b("q", "eight"), a("answers: seven; eight. Which?", "7.5"), a("q | =7.5 | on", "done")],
        ["seven", "7.5", "done"],
        of_b=[],
    ),
    Script(
        "a planner whose transcript another model's calls fill",
        [a("q", "plan A"), b("q", "call", tools=LOOK), b("q | =call | @r", "answer", tools=LOOK)],
        ["plan A"],
        of_b=["call", "answer"],
    ),
    Script(
        "a classifier with labels, whose transcript the experts fill",
        [a("q", "math", constraints=LABELS), a("q | =it is 17 | r", "code", constraints=LABELS)],
        ["math", "code"],
    ),
    Script(
        "a label and an answer to the same messages",
        [a("q", "math", constraints=LABELS), a("q", "17"), a("q | =17 | on", "18")],
        ["math", "17", "18"],
    ),
    Script(
        "another model is asked before the policy",
        [b("q", "theirs"), b("q | =theirs | u", "more"), a("q", "mine")],
        ["mine"],
        of_b=["theirs", "more"],
    ),
    Script(
        "another model is asked at the same time",
        [a("q", "mine"), b("q", "theirs", at_once=True)],
        ["mine"],
        of_b=["theirs"],
    ),
    Script(
        "another model's answer to the same question never came",
        [a("q", "mine"), b("q", "lost", delivered=False)],
        ["mine"],
        of_b=[],
    ),
    Script(
        "another model solves the same task in a conversation of its own, after the policy",
        [a("q", "look"), a("q | =look | @r", "17"), b("q", "see"), b("q | =see | @r", "18")],
        ["look", "17"],
        of_b=["see", "18"],
    ),
    Script(
        "a retry that shows the error continues the bad answer",
        [a("q", "{bad"), a("q | ={bad | no JSON", "{}")],
        ["{bad", "{}"],
    ),
    Script(
        "an agent that inserts a message of its own before the answer",
        [a("q", "the answer"), a("q | =One moment. | =the answer | on", "done")],
        ["the answer", "done"],
    ),
    Script(
        "an agent that leaves out the answer",
        [a("q", "noise"), a("q | on", "done")],
        ["noise", "done"],
    ),
    Script(
        "questions that differ by white space are other questions",
        [a("if a:\n  b", "1"), a("if a:\nb | =2 | on", "done")],
        ["1", "done"],
    ),
]


def play(script: Script, folder: Path) -> Agent:
    agent = Agent(folder)
    asks = list(script.asks)
    while asks:
        together = [asks.pop(0)]
        while asks and asks[0].at_once:
            together.append(asks.pop(0))
        times = [clock.tick() for _ in together]
        for ask, at in zip(together, times, strict=True):
            model = None if ask.model == "base" else ask.model
            agent.ask(messages(ask.conversation), ask.answer, at=at, model=model, **ask.options)
    return agent


@pytest.mark.parametrize("script", [*DISCARDED, *USED], ids=lambda script: script.title)
def test_trained_answers_are_those_that_a_reader_would_mark(script: Script, tmp_path: Path) -> None:
    agent = play(script, tmp_path)
    reply = agent.reply()
    trained = [answer for history in answers(reply) for answer in history]
    assert sorted(trained) == sorted(script.trained)
    assert sum(ask.model == "a" for ask in script.asks) == reply.num_choices + sum(reply.unused.values())
    assert script.reason is None or set(reply.unused) == {script.reason}
    if script.of_b is not None:
        assert sorted(answer for history in answers(agent.reply("b")) for answer in history) == sorted(script.of_b)
