"""Rewards: checks of text, sums."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art
from art.rewards import (
    contains,
    exact_match,
    json_match,
    number_match,
    regex_match,
    set_reward,
)

pytestmark = pytest.mark.anyio


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(" yes\n", "yes") == 1.0
    assert exact_match("Yes", "yes") == 0.0 and exact_match("Yes", "yes", ignore_case=True) == 1.0
    assert exact_match("y es", "yes") == 0.0
    assert exact_match(None, "yes") == 0.0 and exact_match(None, "") == 1.0


def test_contains_finds_the_answer_in_a_sentence() -> None:
    assert contains("I say yes.", " yes\n") == 1.0 and contains("I say Yes.", "yes") == 0.0
    assert contains("I say Yes.", "yes", ignore_case=True) == 1.0
    assert contains("15", "5") == 1.0 and contains(None, "yes") == 0.0
    with pytest.raises(ValueError, match="is empty"):
        contains("yes", " ")


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("The answer is 42.", 42, 1.0),
        ("6 * 7 = 42", 42, 1.0),
        ("42, or rather 43", 42, 0.0),
        ("1,234,567.5 dollars", 1234567.5, 1.0),
        ("-3e-2", -0.03, 1.0),
        (".5", 0.5, 1.0),
        ("e5", 5, 1.0),
        ("1e999", 5, 0.0),
        ("3.1415", 3.14159265, 0.0),
        ("none", 1, 0.0),
        ("The answer is \N{MINUS SIGN}5", -5, 1.0),
        ("The answer is \N{MINUS SIGN}5", 5, 0.0),
        ("on 2024-05-15", 15, 1.0),
        ("10-15", 15, 1.0),
        ("May 12,2024", 2024, 1.0),
        ("3,1415", 1415, 1.0),
        ("x=-5", -5, 1.0),
        ("**-5**", -5, 1.0),
        (None, 0, 0.0),
    ],
)
def test_number_match_takes_the_last_number(answer: str | None, expected: float, reward: float) -> None:
    assert number_match(answer, expected) == reward


@given(st.text(alphabet="0123456789+-.,eE \u0663x", max_size=12))
def test_no_answer_makes_a_check_raise(answer: str) -> None:
    assert number_match(answer, 1.0) in (0.0, 1.0)
    assert json_match(answer) in (0.0, 1.0)


def test_number_match_has_tolerances() -> None:
    assert number_match("3.1415", 3.14159265, relative=1e-4) == 1.0
    assert number_match("0.0001", 0.0, absolute=1e-3) == 1.0


def test_regex_match_is_of_the_whole_answer() -> None:
    assert regex_match(" (a) ", r"\([abc]\)") == 1.0
    assert regex_match("(a) or (b)", r"\([abc]\)") == 0.0
    with pytest.raises(re.error):
        regex_match("a", "(")


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"city": "Ulm"}', 1.0),
        ('```json\n{"city": "Ulm"}\n```', 1.0),
        ('Here it is:\n```\n{"city": "Ulm"}\n```\nDone.', 1.0),
        ('{"city": 3}', 0.0),
        ("NaN", 0.0),
        ('{"city": "Ulm"} and more', 0.0),
        ("[" * 100_000, 0.0),
        (None, 0.0),
    ],
)
def test_json_match_checks_the_schema(answer: str | None, reward: float) -> None:
    assert json_match(answer, SCHEMA) == reward


def test_json_match_of_a_nested_answer_does_not_raise() -> None:
    schema = {"type": "array", "items": {"$ref": "#"}}
    assert json_match("[" * 5 + "]" * 5, schema) == 1.0
    assert json_match("[" * 900 + "]" * 900, schema) == 0.0, "deeper than the check can follow"


def test_json_match_of_a_number_that_is_infinite_does_not_raise() -> None:
    assert json_match("1.5", {"multipleOf": 0.5}) == 1.0
    assert json_match("1e999", {"multipleOf": 0.5}) == 0.0


def test_a_fence_before_many_line_breaks_is_read_once() -> None:
    """To read it once for each line break would take hours."""
    assert json_match("```" + "\n" * 2_000_000) == 0.0
    assert json_match("```json \n\n 1 \n```") == 1.0


def test_json_match_refuses_what_is_no_schema() -> None:
    assert json_match("[1]") == 1.0 and json_match("[NaN]") == 0.0
    with pytest.raises(ValueError):
        json_match("1", {"type": "nothing"})


def test_a_sum_logs_its_parts() -> None:
    trajectory = art.Trajectory(messages_and_choices=[], metrics={"turns": 2})
    rewarded = set_reward(trajectory, {"right": 1.0, "short": 0.5}, {"short": 0.2})
    assert rewarded is trajectory and rewarded.reward == pytest.approx(1.1)
    assert rewarded.metrics == {"turns": 2, "reward/right": 1.0, "reward/short": 0.5}


@pytest.mark.parametrize(
    ("parts", "weights", "part"),
    [
        ({"right": float("nan")}, None, "'right'"),
        ({"right": 1.0}, {"wrong": 1.0}, "'wrong'"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(parts: dict[str, float], weights: dict[str, float] | None, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        set_reward(art.Trajectory(messages_and_choices=[]), parts, weights)


PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
SNIPPET, *OF_JUDGES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_runs() -> None:
    message = {"role": "assistant", "content": "It is 42."}
    choice = art.types.Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message})
    names: dict[str, Any] = {"art": art, "messages": [], "choice": choice}
    exec(SNIPPET, names)
    assert names["trajectory"].metrics["reward/right"] == 1.0
    assert names["trajectory"].reward == pytest.approx(1 + 0.1 * (1 - 9 / 500))


async def test_the_judges_of_the_page_run(
    server, answer, model: art.TrainableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(request: Any) -> Any:
        ids = re.findall(r'<trajectory id=\\"(\d+)', request.body.decode()) or ["1"]
        text = json.dumps({"scores": {trajectory_id: int(trajectory_id) / 4 for trajectory_id in ids}})
        return answer(body={"choices": [{"message": {"content": text}}]})

    async def rollout(question: str) -> art.Trajectory:
        said: Any = {"role": "assistant", "content": f"{question} {len(rollouts)}"}
        rollouts.append(art.Trajectory(messages_and_choices=[said]))
        return rollouts[-1]

    rollouts: list[art.Trajectory] = []
    server.on("POST", "/v1/chat/completions", judge)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"art": art, "model": model, "rollout": rollout}
    names |= {"judge_url": f"{server.url}/v1", "questions": ["Why?"], "answer": "Rome"}
    for snippet in OF_JUDGES:
        code = compile(snippet, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(code, names)
    (group,) = names["groups"]
    assert [trajectory.reward for trajectory in group] == [0.25, 0.5, 0.75, 1.0]
    assert [trajectory.reward for trajectory in names["scored"]] == [0.5] * 4, "it prefers the second"
    requests = server.sent("POST", "/v1/chat/completions")
    assert [request.json()["model"] for request in requests] == ["qwen3-32b"] + ["art/tiny"] * 12 + ["qwen3-32b"]
    assert len(list((tmp_path / "judge-cache").iterdir())) == 2
    assert names["verdict"].score == 0.25
