"""Built-in evaluators on rows whose answers are JSON, and rows that no output can be compared with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from art.finetune import WrongInput
from art.finetune.rows import DatasetRow, load_rows
from art.finetune.runs import prepare
from art.finetune.scoring import Reward
from art.finetune.sections import DatasetSection
from plugins.finetune.tests.policy_server import PolicyServer

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]

EXACT: list[tuple[Any, Any, float]] = [
    (True, "true", 1.0),
    (True, " true\n", 1.0),
    (True, "True", 0.0),
    (True, "1", 0.0),
    (1, "true", 0.0),
    (True, True, 1.0),
    (5.0, "5", 1.0),
    (5, "5.0", 1.0),
    (5, "five", 0.0),
    ([1, "a", None], '[1.0, "a", null]', 1.0),
    ([1, 2], "[1, 2, 3]", 0.0),
    ([[True]], "[[1]]", 0.0),
    ({"a": 1, "b": [2]}, '{"b": [2], "a": 1}', 1.0),
    ({"a": 1}, "{'a': 1}", 0.0),
    ({"a": 1}, {"a": 1}, 1.0),
    ({"a": "\u00e4"}, '{"a": "\\u00e4"}', 1.0),
    ("true", "true", 1.0),
    ("5.0", "5", 0.0),
    ([], "[", 0.0),
    ([], "[" * 100_000, 0.0),
    (False, None, 0.0),
]


async def score(make_file: MakeFile, evaluator: dict[str, Any], answer: Any, output: Any) -> float:
    config = prepare(make_file(eval__evaluators={"reward": evaluator})).config
    trajectory = art.Trajectory()
    await Reward(config, config.finetuning.reward_function, {}).score(
        DatasetRow("r", "q", answer, {}), output, trajectory
    )
    return trajectory.reward


@pytest.mark.parametrize(("answer", "output", "expected"), EXACT)
async def test_exact_match_compares_json_by_its_value(
    make_file: MakeFile, answer: Any, output: Any, expected: float
) -> None:
    assert await score(make_file, {"_type": "exact_match"}, answer, output) == expected


async def test_case_can_be_ignored_in_json(make_file: MakeFile) -> None:
    evaluator = {"_type": "exact_match", "ignore_case": True}
    assert await score(make_file, evaluator, ["Paris", True], '["paris", TRUE]') == 1.0
    assert await score(make_file, evaluator, ["Paris"], '["Rome"]') == 0.0


NUMBERS = [("1,234", "1234"), ("42%", "it is 42 %"), ("$5", "5.0"), (5, "5"), ("\N{MINUS SIGN}3", "-3"), (0.5, ".5")]


@pytest.mark.parametrize(("answer", "output"), NUMBERS)
async def test_number_match_reads_the_answer_as_the_output(
    folder: Path, make_file: MakeFile, answer: Any, output: str
) -> None:
    (folder / "rows.json").write_text(json.dumps([{"question": "q", "answer": answer}]))
    assert await score(make_file, {"_type": "number_match"}, answer, output) == 1.0


BAD = [
    ("number_match", "about five", "has no finite number"),
    ("number_match", True, "true is no number"),
    ("number_match", [5], "a list is no number"),
    ("number_match", "1e999", "has no finite number"),
    ("number_match", None, "is empty"),
    ("exact_match", None, "is empty"),
    ("exact_match", float("nan"), "not JSON compliant"),
    ("regex_match", "(", "unterminated"),
]


@pytest.mark.parametrize(("kind", "answer", "words"), BAD)
async def test_a_row_that_cannot_be_judged_is_an_error_before_the_server_is_asked(
    policy: PolicyServer, folder: Path, make_file: MakeFile, kind: str, answer: Any, words: str
) -> None:
    rows = [{"question": "q", "right": "5"}, {"question": "r", "right": answer}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl", "structure": {"answer_key": "right"}}
    file = make_file(eval__general__dataset=dataset, eval__evaluators={"reward": {"_type": kind}})
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.run(file)
    (problem,) = wrong.value.problems
    assert problem.startswith(
        "configuration: eval.general.dataset: rows.jsonl: line 2, column 'right': evaluator 'reward'"
    )
    assert words in problem and not policy.requests


async def test_a_column_of_answers_that_no_row_has_is_one_line_with_the_flag(folder: Path, make_file: MakeFile) -> None:
    rows = [{"id": str(number), "question": f"q{number}", "gold": "5"} for number in range(9)]
    (folder / "rows.json").write_text(json.dumps(rows))
    file = make_file(eval__evaluators={"reward": {"_type": "exact_match"}})
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.run(file)
    (problem,) = wrong.value.problems
    assert problem.endswith("columns are id, question, gold; --answer_key gold") and "no column 'answer'" in problem
    await art.finetune.evaluate(file, {"eval.general.dataset.structure.answer_key": "gold"}, limit=1)


async def test_rows_of_validations_are_checked_and_many_are_counted(folder: Path, make_file: MakeFile) -> None:
    (folder / "val.json").write_text(json.dumps([{"question": f"q{number}", "answer": "none"} for number in range(9)]))
    evaluators = {"reward": {"_type": "agent.py:score"}, "number": {"_type": "number_match"}}
    validation = {"dataset": "val.json", "reward": {"name": "number"}}
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.run(make_file(eval__evaluators=evaluators, finetuning__validation=validation))
    assert len(wrong.value.problems) == 6 and wrong.value.problems[-1].endswith("4 more rows cannot be judged")
    with pytest.raises(WrongInput, match="column 'answer'"):
        await art.finetune.run(
            make_file(eval__evaluators=evaluators, finetuning__validation={"reward": {"name": "number"}})
        )


def test_a_csv_field_can_be_a_long_document(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    document = "x" * 1_000_000
    file.write_text(f'question,answer\n"{document}",a\n')
    (row,) = load_rows(DatasetSection.model_validate({"_type": "csv", "file_path": file})).rows
    assert row.question == document and row.location == "line 2"
