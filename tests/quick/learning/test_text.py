"""Texts of scores teach: the advantages are those of the teacher's log-probabilities, once for each score, and a text that cannot teach
does no harm."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

import art
from art_protocol.learning import Policy, default_config
from art_protocol.teaching import MAX_ADVANTAGE
from art_server.jobs.trainer_process import TrainerError
from art_server.learning.batches import choose
from art_server.learning.releasing import opinions_of
from art_server.learning.scores import WaitingScore
from art_server.ledger.records import TEMPLATE_KWARGS
from art_server.shared.advantages import trained_tokens
from art_server.shared.trainer_messages import Batch
from art_server.store.database import Database
from art_server.store.server_database import LEARNING, open_server_database
from tests.fakes.vllm import ANSWER, PROMPT
from tests.quick.learning.crowd import NAME, ROUTES, Crowd, crowd

pytestmark = pytest.mark.anyio

FOUR = {"batch": 4, "least": 2, "user_share": 1}
TWO = {"batch": 2, "least": 2, "user_share": 1}
KNOWS = [-0.2, -7.5]
"""The teacher's log-probabilities of the answer's two tokens. The student's are -0.5."""
TAUGHT = {3: pytest.approx(0.3), 4: -MAX_ADVANTAGE}
"""By position: -0.2 + 0.5, and -7.5 + 0.5, which is clamped."""


def reads_hint(name: str, prompt: list[int], position: int) -> float:
    """What the fake engine gives: a longer prompt is a teacher's."""
    is_answer = position >= len(prompt) - len(ANSWER)
    return KNOWS[position - len(prompt)] if is_answer and len(prompt) > len(PROMPT) + len(ANSWER) else -0.5


def advantages(shop: Crowd, number: int = 0) -> list[dict[int, float]]:
    """The own advantages of each answer of a trained batch, by position."""
    groups = Batch.model_validate(shop.served.trainer.batches[number]).groups
    return [group.trajectories[0].sequences[0].advantages for group in groups]


async def ended_job(shop: Crowd) -> dict[str, Any]:
    (job,) = (await shop.http.get("/api/jobs", params={"state": "done"})).json()["jobs"]
    return job


async def has_note(shop: Crowd, words: str) -> bool:
    return any(words in note for note in (await ended_job(shop))["report"]["notes"])


TEXTS: dict[str, dict[str, Any]] = {
    "a comment of a bad score": {"value": 0, "comment": "It has no price."},
    "a comment without a value": {"value": None, "comment": "It has no price."},
    "a correction": {"value": 1, "correction": "It costs 12."},
}


@pytest.mark.parametrize("kind", TEXTS)
async def test_a_text_gives_each_token_the_gap_between_teacher_and_student(kind: str, tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**TWO)
        for number in range(2):
            score = await shop.score(await shop.answer(number), user=f"u{number}", **TEXTS[kind])
            assert (score["state"], score.get("value")) == ("scored", TEXTS[kind]["value"])
        assert (await shop.trained(1))["counts"] == {"trained": 2}
        assert advantages(shop) == [TAUGHT, TAUGHT]
        read = {tuple(prompt) for _, prompt in shop.served.engine.vllm.scored if len(prompt) == 3 + 3 + 2}
        texts = [body["messages"][-1]["content"] for body in shop.served.engine.rendered]
        assert read and any("It has no price." in text or "It costs 12." in text for text in texts)
        assert await has_note(shop, "2 of 2 scored answers are taught by the texts")


async def test_a_comment_beside_the_best_value_is_no_lesson(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**FOUR)
        for number, value in enumerate([1, 1, 0, 0]):
            text = {"comment": "thanks!"} if value else {}
            await shop.score(await shop.answer(number), value, user=f"u{number}", **text)
        await shop.trained(1)
        assert advantages(shop) == [{}] * 4 and shop.served.engine.rendered == []


async def test_rewards_are_compared_with_those_of_taught_answers_and_a_text_alone_is_neither_good_nor_bad(
    tmp_path: Path,
) -> None:
    """The values are 1, 0 and 0, and the text alone has their mean: 1/3, a deviation of sqrt(2/9 * 3/4) = 0.4082."""
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**FOUR)
        for number, (value, comment) in enumerate([(1, None), (0, None), (0, "no price"), (None, "no price")]):
            await shop.score(await shop.answer(number), value, user=f"u{number}", comment=comment)
        await shop.trained(1)
        groups = Batch.model_validate(shop.served.trainer.batches[0]).groups
        trained = [group[0][0] for group in trained_tokens(groups, default_config()) if group is not None]
        by_hand = [[1.63299] * 2, [-0.81650] * 2, [0.3, -5], [0.3, -5]]
        assert [[value for _, value in tokens] for tokens in trained] == [
            pytest.approx(values, abs=1e-5) for values in by_hand
        ]
        assert (await ended_job(shop))["metrics"]["train/reward"] == pytest.approx(1 / 3)


async def test_a_text_that_changes_nothing_has_the_advantage_zero(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**TWO)
        for number in range(2):
            await shop.score(await shop.answer(number), 0, user=f"u{number}", comment="hm")
        await shop.trained(1)
        assert advantages(shop) == [{3: 0.0, 4: 0.0}] * 2


async def test_a_later_step_is_compared_with_itself(tmp_path: Path) -> None:
    """The step that serves gives all tokens -0.9, with and without the text: the text changes nothing, though the step has."""
    async with crowd(tmp_path) as shop:
        await shop.learn(**TWO)
        late = [await shop.answer(number) for number in range(2)]
        for number, value in enumerate([1, 0]):
            await shop.score(await shop.answer(9 + number), value, user=f"v{number}")
        await shop.trained(1)
        shop.served.engine.vllm.logprob_of = lambda name, prompt, position: -0.9
        for number, answer in enumerate(late):
            await shop.score(answer, 0, user=f"u{number}", comment="hm")
        await shop.trained(2)
        assert advantages(shop, 1) == [{3: 0.0, 4: 0.0}] * 2


async def test_the_teacher_reads_what_the_request_gave_the_template(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**TWO)
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        for number in range(2):
            answer = await shop.answer(number, chat_template_kwargs={"enable_thinking": False}, tools=tools)
            await shop.score(answer, 0, user=f"u{number}", comment="hm")
        await shop.trained(1)
        for body in shop.served.engine.rendered:
            assert (body[TEMPLATE_KWARGS], body["tools"]) == ({"enable_thinking": False}, tools)


async def test_a_job_that_is_tried_again_trains_the_same_numbers(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        shop.served.trainer.events = [TrainerError("died", "the trainer died", retryable=True)]
        await shop.learn(**TWO)
        for number in range(2):
            await shop.score(await shop.answer(number), 0, user=f"u{number}", comment="hm")
        await shop.trained(1)
        assert advantages(shop, 0) == advantages(shop, 1) == [TAUGHT, TAUGHT]
        asked = [prompt for _, prompt in shop.served.engine.vllm.scored if len(prompt) == 3 + 3 + len(ANSWER)]
        assert len(asked) == 2, "the teacher is asked once"


async def test_a_server_that_ends_while_the_teacher_is_asked_asks_again(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        vllm = shop.served.engine.vllm
        vllm.may_score.clear()
        await shop.learn(**TWO)
        for number in range(2):
            await shop.score(await shop.answer(number), 0, user=f"u{number}", comment="hm")
        while not vllm.scored:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await shop.answer(5)).startswith("chatcmpl-"), "requests are answered meanwhile"
        assert (await shop.info())["counts"] == {"scored": 2}
        await shop.served.server.background.stop("learning")
        vllm.may_score.set()
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        assert (await shop.trained(1))["counts"] == {"trained": 2}
        assert len(shop.served.trainer.batches) == 1


async def test_an_engine_that_fails_makes_the_batch_wait_and_at_last_pauses_the_learning(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        vllm = shop.served.engine.vllm
        vllm.logprob_of, vllm.num_refusing = reads_hint, 6
        await shop.learn(**TWO)
        for number in range(2):
            await shop.score(await shop.answer(number), 0, user=f"u{number}", comment="hm")
        while (await shop.info())["state"] != "paused":
            shop.served.server.collector.wake()
            await asyncio.sleep(0.02)
        info = await shop.info()
        assert (
            "the teacher of a batch with texts did not answer" in info["reason"]
            and "it cannot compute" in info["reason"]
        )
        assert info["counts"] == {"scored": 2} and await shop.answer(7)
        vllm.num_refusing = 0
        await shop.http.post(f"{ROUTES}/learning", json={"action": "resume"})
        assert (await shop.trained(1))["counts"] == {"trained": 2}
        assert advantages(shop) == [TAUGHT, TAUGHT]


async def test_without_the_messages_of_the_request_only_the_value_trains(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answers = [await shop.answer(number) for number in range(3)]
        await shop.learn(**TWO)
        lost = await shop.score(answers[2], None, comment="no price")
        assert (lost["state"], lost["reason"]) == ("dropped", "no_messages")
        for number, value in enumerate([1, 0]):
            await shop.score(answers[number], value, user=f"u{number}", comment="hm")
        info = await shop.trained(1)
        assert info["counts"] == {"trained": 2, "dropped": 1, "dropped: no_messages": 1}
        assert advantages(shop) == [{}, {}]
        assert await has_note(shop, "1 scores have a text that teaches nothing")


async def test_what_is_too_long_for_the_context_teaches_nothing_and_nothing_is_cut(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        shop.served.engine.max_seq_length = 3 + 3 + len(ANSWER)  # the engine samples one token more
        alone = await shop.score(await shop.answer(4), None, correction="It costs 12.")
        for number, value in enumerate([1, 0, 1, 0]):
            await shop.score(await shop.answer(number), value, user=f"u{number}", comment="hm")
        info = await shop.trained(1)
        assert info["counts"] == {"trained": 4, "dropped": 1, "dropped: too_long": 1}
        dropped = (await shop.http.get(f"{ROUTES}/feedback/{alone['id']}")).json()
        assert (dropped["state"], dropped["reason"]) == ("dropped", "too_long")
        assert advantages(shop) == [{}] * 4


async def test_a_policy_may_turn_texts_off(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**TWO, text="off")
        answers = [await shop.answer(number) for number in range(2)]
        body = {"answer": answers[0], "comment": "no price"}
        refused = await shop.http.post(f"{ROUTES}/feedback", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "no_value")
        for value, answer in enumerate(answers):
            await shop.score(answer, value, user=f"u{value}", comment="hm", correction="It costs 12.")
        await shop.trained(1)
        assert advantages(shop) == [{}, {}]
        ((num_turns,),) = shop.served.server.ledger._storage.db.execute("SELECT COUNT(*) FROM turns").fetchall()
        assert num_turns == 0, "messages are kept for texts only"


async def test_messages_are_kept_only_while_they_may_teach(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:

        async def has_messages() -> bool:
            answer = (await shop.answer(3)).removeprefix("chatcmpl-")
            return shop.served.server.ledger.find_messages(answer) is not None

        assert not await has_messages()
        await shop.learn(**TWO)
        assert await has_messages()
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "store": False}
        private = (await shop.http.post("/v1/chat/completions", json=chat)).json()["id"].removeprefix("chatcmpl-")
        assert shop.served.server.ledger.find_messages(private) is None
        assert (await shop.http.post(f"{ROUTES}/rename", json={"name": "renamed"})).status_code == 200
        assert shop.served.server.registry.all()[0].keeps_messages
        await shop.http.delete("/api/models/shop/renamed/learning")
        assert not shop.served.server.registry.all()[0].keeps_messages
        await shop.http.put("/api/models/shop/renamed/learning", json=TWO)
    async with crowd(tmp_path) as shop:
        kept = [model.id for model in shop.served.server.registry.all() if model.keeps_messages]
        assert kept == ["shop/renamed"]


APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "responses": {"input": "hello"},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_the_messages_of_an_api_are_kept_for_the_teacher(path: str, is_stream: bool, tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**TWO)
        for number in range(2):
            reply = await shop.http.post(f"/v1/{path}", json={"model": NAME, "stream": is_stream, **APIS[path]})
            (answer, *_) = re.findall(r'"id": ?"((?:chatcmpl|resp)[^"]+)"', reply.text)
            assert (await shop.score(answer, None, user=f"u{number}", comment="no"))["state"] == "scored"
        await shop.trained(1)
        assert advantages(shop) == [TAUGHT, TAUGHT]
        contents = {body["messages"][-1]["content"] for body in shop.served.engine.rendered}
        assert len(contents) == 2 and all(content.startswith("hello") for content in contents)


async def test_a_text_and_a_value_of_one_user_are_two_scores_of_one_answer(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**FOUR)
        answers = [await shop.answer(number) for number in range(2)]
        for answer in answers:
            first = await shop.score(answer, None, user="ada", comment="no")
            second = await shop.score(answer, None, user="ada", comment="no price")
            thumb = await shop.score(answer, 0, user="ada")
            assert second["replaces"] == first["id"] and "replaces" not in thumb
        await shop.http.post(f"{ROUTES}/learning", json={"action": "train"})
        assert (await shop.trained(1))["counts"] == {"replaced": 2, "trained": 4}
        assert advantages(shop) == [TAUGHT, TAUGHT]
        lines = "\n".join(json.dumps({"answer": answers[0], **more}) for more in ({"comment": " "}, {"comment": "x"}))
        headers = {"content-type": "application/x-ndjson"}
        reply = await shop.http.post(f"{ROUTES}/feedback", content=lines, headers=headers)
        refused, late = map(json.loads, reply.text.splitlines())
        assert refused["error"]["code"] == "invalid_body"
        assert (late["state"], late["reason"]) == ("dropped", "already_trained")


async def test_a_program_gives_a_correction_without_a_value(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop, art.Backend(shop.served.url) as backend:
        await shop.learn(**TWO)
        model = art.TrainableModel(name="helper", project="shop", base_model="base")
        await model.register(backend)
        score = await model.feedback(await shop.answer(), correction="It costs 12.")
        assert (score.state, score.value) == ("scored", None)


async def test_a_text_about_a_session_teaches_its_turns(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.logprob_of = reads_hint
        await shop.learn(**TWO)
        for number in range(2):
            url = f"{shop.served.url}/s/s{number}/v1/chat/completions"
            body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
            assert (await shop.http.post(url, json=body)).status_code == 200
            score = {"session": f"s{number}", "comment": "no price", "user": f"u{number}"}
            assert (await shop.http.post(f"{ROUTES}/feedback", json=score)).status_code == 202
        await shop.trained(1)
        assert advantages(shop) == [TAUGHT, TAUGHT]


# --- which scores a batch has -------------------------------------------------------------------------------------------


def scored(number: int, value: float | None = 1.0, teaches: Any = None, **more: Any) -> WaitingScore:
    fields: dict[str, Any] = {"target": f"answer {number}", "choices": [str(number)], "step": 5, "answered_at": 0.0}
    fields |= {"user": None, "name": "thumb"}
    return WaitingScore(number, value=value, teaches=teaches, **(fields | more))


def numbers(waiting: list[WaitingScore], **policy: Any) -> list[int]:
    """The chosen scores; none without a signal."""
    chosen = choose(waiting, Policy(**{"batch": 3, "user_share": 1, **policy}), newest_step=5, now=0.0)
    return [score.number for unit in chosen.units for score in unit.scores] if chosen.has_signal else []


def test_equal_rewards_wait_while_those_that_are_taught_train() -> None:
    equal = [scored(number, 0.0) for number in range(3)]
    taught = [scored(3 + number, value, "comment") for number, value in enumerate([0.0, None])]
    assert numbers([*equal, *taught]) == [3, 4]
    assert numbers([*equal, *taught], text="off") == numbers(equal) == []
    assert numbers([*equal, *taught, scored(9, 1.0)]) == [0, 1, 9], "the oldest with another reward is among them"
    assert numbers([*taught, *equal, scored(9, 1.0)]) == [3, 0, 9]


def test_a_text_alone_waits_while_texts_are_off() -> None:
    texts = [scored(number, None, "comment") for number in range(3)]
    assert numbers(texts) == [0, 1, 2] and numbers(texts, text="off") == []


@pytest.mark.parametrize(
    ("value", "others", "is_taught"),
    [
        (1.0, [], False),
        (0.9, [], True),
        (0.0, [1.0], True),
        (1.0, [0.0], False),
        (None, [], True),
        (None, [1.0], False),
        (None, [1.0, 0.0], True),
    ],
)
def test_a_comment_teaches_where_something_was_wrong(value: float | None, others: list[float], is_taught: bool) -> None:
    same = {"target": "answer 0", "choices": ["0"]}
    scores = [scored(0, value, "comment", **same)]
    scores += [scored(1 + n, other, user=f"u{n}", **same) for n, other in enumerate(others)]
    (unit,) = choose(scores, Policy(), newest_step=5, now=0.0).units
    assert unit.is_taught == is_taught


def test_a_text_alone_is_no_opinion_about_a_canary() -> None:
    assert opinions_of([scored(0, None, "comment")], Policy()) == {}
    ((opinion,),) = opinions_of([scored(0, 1.0, target="a"), scored(1, None, "comment", target="a")], Policy()).values()
    assert opinion.reward == 1.0


def test_the_best_value_of_a_penalty_is_its_lowest() -> None:
    names: Any = {"thumb": {"weight": -1}}
    (unit,) = choose([scored(0, 0.0, "comment")], Policy(names=names), newest_step=5, now=0.0).units
    assert not unit.is_taught


# --- databases of earlier commits ---------------------------------------------------------------------------------------


def test_scores_of_an_earlier_commit_stay_and_take_texts_without_a_value(tmp_path: Path) -> None:
    database = open_server_database(tmp_path)
    earlier = (
        LEARNING[0].replace("value REAL, ", "value REAL NOT NULL, ").replace("        teaches TEXT, ", "        -- ")
    )
    with database.changes("the test") as connection:
        connection.execute("DROP TABLE scores")
        connection.execute(earlier)
        for statement in LEARNING[1:]:
            connection.execute(statement)
        add(database, 1.0)
    database.close()
    database = open_server_database(tmp_path)
    add(database, None)
    assert [tuple(row) for row in database.select("SELECT number, value FROM scores ORDER BY number")] == [
        (1, 1.0),
        (2, None),
    ]
    names = {row[0] for row in database.select("SELECT name FROM sqlite_master WHERE tbl_name = 'scores'")}
    assert {"scores_by_day", "scores_by_target"} <= names
    database.close()


def add(database: Database, value: float | None) -> None:
    with database.changes("the test") as connection:
        connection.execute(
            "INSERT INTO scores (score_id, model, target, choices, owner, name, value, texts, digest, answered_at, created_at, state)"
            " VALUES (?, 1, 't', '[]', 'o', 'thumb', ?, '{}', '', 0, 0, 'scored')",
            (str(value), value),
        )
