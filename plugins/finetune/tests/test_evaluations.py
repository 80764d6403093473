"""`art eval`: chosen rows, results by row, the gate, the page of differences, judges and their agreement with labels; sampling."""

import asyncio
import gc
import json
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import art
import art.finetune
from art.estimates import estimate
from art.finetune import BelowTarget, FinetuneError, NoServer, WrongInput
from art.finetune.agreement import cohens_kappa
from art.finetune.differences import compare, write_page
from art.finetune.evaluating import FileEvaluation
from art.finetune.results import ResultRecord, read_results
from art.finetune.runs import prepare
from art_finetune.commands import _input, evaluate_flags, run_eval  # pyright: ignore[reportPrivateUsage]
from plugins.finetune.tests.commands import parsed
from plugins.finetune.tests.policy_server import PolicyServer
from tests.fakes.server import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio

DOCS = (Path(__file__).parents[3] / "docs" / "finetune.md").read_text()
MakeFile = Callable[..., dict[str, Any]]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def asked_rows(policy: PolicyServer) -> list[str]:
    return sorted(body["messages"][-1]["content"] for body in policy.asked)


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [({"limit": 2}, [0, 1]), ({"ids": ["row 3"]}, [3]), ({"ids": ["row 3", "row 1"], "limit": 1}, [1])],
)
async def test_an_evaluation_of_chosen_rows(
    policy: PolicyServer, make_file: MakeFile, chosen: dict[str, Any], rows: list[int]
) -> None:
    evaluation = await art.finetune.evaluate(make_file(finetuning__validation={"dataset": "rows.json"}), **chosen)
    assert asked_rows(policy) == [f"question {row}" for row in rows] and evaluation.num_rollouts == len(rows)
    assert not policy.logged, "the history has means over all rows"


async def test_a_run_of_chosen_rows(policy: PolicyServer, make_file: MakeFile) -> None:
    await art.finetune.run(make_file(finetuning__num_epochs=1), {"eval.general.dataset.ids": ["row 2"]})
    assert asked_rows(policy) == ["question 2"] * 2


@pytest.mark.parametrize("of", ["finetuning.validation.dataset", "eval.general.dataset"])
async def test_a_row_that_does_not_exist_is_an_error_before_the_server_is_asked(
    policy: PolicyServer, make_file: MakeFile, of: str
) -> None:
    changes = {"finetuning__validation": {"dataset": "rows.json"}} if "validation" in of else {}
    with pytest.raises(WrongInput, match="no row has the id 'row 33'; did you mean 'row 3'"):
        await art.finetune.evaluate(make_file(**changes), ids=["row 33"])
    assert not policy.requests


async def test_a_limit_is_above_0(policy: PolicyServer, make_file: MakeFile) -> None:
    with pytest.raises(WrongInput, match="limit must be at least 1, not 0"):
        await art.finetune.evaluate(make_file(), limit=0)
    with pytest.raises(WrongInput, match=r"-o eval\.general\.dataset\.limit: must be greater than or equal to 1"):
        await art.finetune.run(make_file(), {"eval.general.dataset.limit": 0})
    assert not policy.requests


def test_flags_choose_rows() -> None:
    flags = parsed("finetune", "f.yml", "--limit", "3", "--id", "a", "--id", "b")
    assert (flags.limit, flags.id) == (3, ["a", "b"])


async def test_the_flag_that_an_error_names_works(folder: Path, make_file: MakeFile, policy: PolicyServer) -> None:
    (folder / "own.csv").write_text("ticket,answer\nquestion 7,yes\n")
    file = make_file(finetuning__validation={"dataset": "own.csv"})
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.evaluate(file)
    match = re.search(r"`-o (\S+) COLUMN`", str(wrong.value))
    assert match is not None
    await art.finetune.evaluate(file, [(match[1], "ticket")])
    assert asked_rows(policy) == ["question 7"]
    changes = {"eval__general__dataset": {"_type": "csv", "file_path": "own.csv"}}
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.evaluate(make_file(**changes))
    match = re.search(r"`-o (\S+) COLUMN`", str(wrong.value))
    assert match is not None
    await art.finetune.evaluate(make_file(**changes), [(match[1], "ticket")])
    assert asked_rows(policy) == ["question 7"] * 2


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "question 5"}]


async def test_a_function_gets_the_messages_of_a_chat_row(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": "yes"}]}, {"messages": CHAT[1:], "answer": "yes"}]
    (folder / "rows.json").write_text(json.dumps(rows))
    code = DOCS.partition("### Chat rows")[2].partition("```python\n")[2].partition("```")[0]
    policy.answer = lambda question, number: "yes"
    exact = {"reward": {"_type": "exact_match"}}
    (folder / "chat.py").write_text(f"import os\nfrom openai import AsyncOpenAI\nclient = AsyncOpenAI()\n{code}")
    evaluation = await art.finetune.evaluate(make_file(workflow___type="chat.py:answer", eval__evaluators=exact))
    await sys.modules["chat"].client.close()
    assert sorted(len(body["messages"]) for body in policy.asked) == [1, 2] and evaluation.reward.mean == 1.0
    with pytest.raises(
        WrongInput, match=r"row 1 has 2 messages, and agent\.py:answer gets only the last question: give it"
    ):
        await art.finetune.evaluate(make_file(eval__evaluators=exact))


# --- results and the gate -----------------------------------------------------------------------------------------

REASONED = """
    def score(row, output):
        if row["id"] == "row 3":
            raise KeyError("no such city")
        return {"score": float(output == row["answer"]), "reason": f"it said {output}"}
"""


async def test_results_have_ids_answers_and_reasons(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    file = make_file(REASONED, finetuning__max_exceptions=0.5)
    policy.answer = lambda question, number: "yes" if question == "question 0" else "no"
    await art.finetune.evaluate(file, reps=2, results="r/results.jsonl")
    records = lines(folder / "r" / "results.jsonl")
    assert len(records) == 8 and not (folder / "out" / "eval_results.jsonl").exists()
    assert [record["id"] for record in records[:8]] == [f"row {row}" for row in range(4) for _ in range(2)]
    right, wrong, failed = records[0], records[2], records[6]
    assert (right["reward"], right["output"], right["reasons"]) == (1.0, "yes", {"reward": "it said yes"})
    assert (wrong["reward"], wrong["answer"], wrong["question"]) == (0.0, "yes", "question 1")
    assert failed["reward"] is None and re.fullmatch(r"KeyError: 'no such city' \(agent.py:\d+\)", failed["error"])
    assert failed["output"] == "no", "what the workflow returned is kept"
    assert failed["session"] and failed["seed"] != right["seed"]


@pytest.mark.parametrize("number", [1, 1.0, 0.1, 0])
async def test_a_number_of_failures_stays_a_count_or_a_share(make_file: MakeFile, number: float) -> None:
    value = prepare(make_file(finetuning__max_exceptions=number)).config.finetuning.max_exceptions
    assert value == number and type(value) is type(number)


async def test_an_evaluation_that_fails_finishes_all_rows_and_leaves_its_results(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    changes = {"finetuning__max_exceptions": 0, "eval__general__max_concurrency": 1}
    words = r"1 of 4 rollouts failed; row 'row 3': KeyError: 'no such city' \(agent.py:\d+\)"
    with pytest.raises(FinetuneError, match=words):
        await art.finetune.evaluate(make_file(REASONED.replace('"row 3"', '"row 3"'), **changes))
    records = lines(folder / "out" / "eval_results.jsonl")
    assert len(records) == 4 and sum("no such city" in (record["error"] or "") for record in records) == 1
    assert not policy.logged


async def test_an_evaluation_in_which_all_rollouts_fail_names_a_row(make_file: MakeFile) -> None:
    code = """
        def score(row, output):
            raise KeyError("no such city")
    """
    with pytest.raises(FinetuneError, match=r"no such city.*row 'row 0'.*\(agent.py:\d+\)"):
        await art.finetune.evaluate(make_file(code), limit=1)


async def test_an_evaluation_whose_server_is_lost_ends_soon(policy: PolicyServer, make_file: MakeFile) -> None:
    code = """
        def score(row, output):
            raise KeyError("no such city")
    """
    healthy = Answer(body={"status": "ok"})
    policy.on("GET", "/health", lambda request: Answer(hang_up=True) if policy.asked else healthy)
    with pytest.raises(NoServer, match="does not answer"):
        await art.finetune.evaluate(make_file(code, eval__general__max_concurrency=1))
    assert len(policy.asked) == 1


GATES = [(["--at_least", "0.2"], 0), (["--at-least", "0.6"], 5), (["--at_least", "1", "--limit", "1"], 5)]


@pytest.mark.parametrize(("arguments", "code"), GATES)
def test_the_gate_is_the_lower_end_of_the_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    async def evaluate(*_: Any, limit: int | None, **__: Any) -> Any:
        rewards = [0.0, 1.0] * 20 if limit is None else [1.0]
        return FileEvaluation("demo/agent@1", 1, estimate(rewards), tuple(rewards), len(rewards), 0, {}, [])

    monkeypatch.setattr("art.finetune.evaluating.evaluate", evaluate)
    ended = 0
    try:
        run_eval(parsed("eval", "f.yml", *arguments))
    except SystemExit as error:
        ended = error.code
    printed = capsys.readouterr()
    assert ended == code and "Evaluation(demo/agent@1: reward" in printed.out
    if code:
        assert "the reward of demo/agent@1" in printed.err and "--at_least" in printed.err


SPOKEN = """
    async def spoken(question):
        return await answer(question)
"""
SILENT = """
    async def silent(question):
        return "yes"
"""


@pytest.mark.parametrize("step", [None, "0", "base"])
async def test_an_evaluation_that_asks_no_model_fails(
    policy: PolicyServer, folder: Path, make_file: MakeFile, step: str | None
) -> None:
    file = make_file(SILENT, workflow___type="agent.py:silent")
    with pytest.raises(FinetuneError, match=r"the session has no answer of .*: the workflow's requests went elsewhere"):
        await art.finetune.evaluate(file, step=step)
    assert not policy.logged and all(
        record["reward"] is None for record in lines(folder / "out" / "eval_results.jsonl")
    )


async def test_an_evaluation_of_the_base_model_has_answers_of_the_base_model(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    policy.num_base_answers = 1
    evaluation = await art.finetune.evaluate(make_file(SILENT, workflow___type="agent.py:silent"), step="base")
    assert (evaluation.name, evaluation.reward.mean) == ("art/tiny", 1.0)


async def test_an_evaluation_counts_answers_to_functions_that_are_not_trained(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    code = """
        import art.finetune
        async def planned(question):
            with art.finetune.function("worker"):
                return await answer(question)
    """
    file = make_file(code, workflow___type="agent.py:planned", finetuning__target_functions=["<workflow>"])
    assert (await art.finetune.evaluate(file)).num_failed == 0


CHANGES: list[dict[str, Any]] = [
    {"overrides": {"eval.evaluators.reward": {"_type": "exact_match"}}},
    {"overrides": [("finetuning.validation.share", None), ("finetuning.validation.dataset", "rows.json")]},
    {"overrides": {"workflow._type": "agent.py:spoken"}},
    {"limit": 4},
]


@pytest.mark.parametrize("changes", CHANGES)
async def test_the_history_has_only_evaluations_of_the_whole_unchanged_file(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    await art.finetune.evaluate(make_file(SPOKEN), **changes)
    assert not policy.logged and "not in the history" in capfd.readouterr().err
    same = {"workflow._type": "agent.py:answer", "eval.general.dataset.file_path": Path("rows.json")}
    await art.finetune.evaluate(make_file(), same | {"eval.general.max_concurrency": 1}, reps=2)
    assert len(policy.logged) == 1 and "not in the history" not in capfd.readouterr().err


FUNCTION = ("eval", "agent.py:answer", "--reward", "agent.py:score", "--base_model", "art/tiny", "--name", "words")


async def test_flags_of_a_function_are_compared_with_the_functions_run(
    policy: PolicyServer,
    folder: Path,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_file()
    monkeypatch.setenv("ART_SERVER_URL", policy.url)
    policy.steps["finetune/words"] = 0
    await evaluate_flags(parsed(*FUNCTION, "--dataset", "rows.json"))
    said = capfd.readouterr().err
    assert not policy.logged and ".tmp/art/words has no run to compare with" in said and "general.dataset" not in said
    flags = parsed("finetune", *FUNCTION[1:], "--dataset", "rows.json", "--num_epochs", "1")
    await art.finetune.run(*_input(flags))
    capfd.readouterr()
    policy.logged.clear()
    await evaluate_flags(parsed(*FUNCTION, "--dataset", "rows.json"))
    said = capfd.readouterr().err
    assert len(policy.logged) == 1 and "not in the history" not in said
    assert "the run in .tmp/art/words was trained on them" in said
    (folder / "other.json").write_text((folder / "rows.json").read_text().replace("question 3", "question 4"))
    await evaluate_flags(parsed(*FUNCTION, "--dataset", "other.json"))
    said = capfd.readouterr().err
    assert (
        "unchanged file: eval.general.dataset\n" in said and "trained on them" not in said and len(policy.logged) == 1
    )


async def test_the_results_are_named_with_what_they_replace(
    make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    async def said(overrides: dict[str, Any] | None = None, **chosen: Any) -> list[str]:
        await art.finetune.evaluate(make_file(), overrides or {}, **chosen)
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("results: ")]

    assert await said() == ["results: out/eval_results.jsonl"] == await said()
    (line,) = await said({"eval.evaluators.reward._type": "exact_match"})
    assert line.endswith(
        "eval_results.jsonl (in place of results of the reward agent.py:score; --results FILE keeps both)"
    )
    assert await said(limit=1) == ["results: out/eval_chosen_results.jsonl"]
    (line,) = await said(step="base", ids=["row 1"])
    assert "eval_chosen_results.jsonl (in place of results of demo/agent@0; " in line
    assert await said(results="r.jsonl") == ["results: r.jsonl"]


async def test_the_evaluated_rows_are_named(
    folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    file, rows = make_file(finetuning__num_epochs=1), "the rows of eval.general.dataset are evaluated"
    await art.finetune.evaluate(file, limit=1)
    assert rows not in capfd.readouterr().err, "a program's dictionary is no file"
    (folder / "f.yml").write_text(json.dumps(file))
    await art.finetune.evaluate("f.yml", limit=1)
    said = capfd.readouterr().err
    assert f"{rows}\n" in said and "trained" not in said
    await art.finetune.run(file)
    await art.finetune.evaluate("f.yml", limit=1)
    assert f"{rows}, and the run in out was trained on them" in capfd.readouterr().err


async def test_failures_of_an_evaluation_are_told_once_with_the_flag(
    make_file: MakeFile, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    await art.finetune.evaluate(make_file(REASONED, finetuning__max_exceptions=0.5))
    said = capfd.readouterr().err
    assert said.count("1 of 4 rollouts failed") == 1 and "-o finetuning.max_exceptions 0 lets none fail" in said
    assert "not trained" not in said + caplog.text and "rollouts failed" not in caplog.text
    with pytest.raises(FinetuneError, match=r"is 0 \(-o finetuning\.max_exceptions N\)"):
        await art.finetune.evaluate(make_file(finetuning__max_exceptions=0))


async def test_logged_rollouts_have_the_ids_of_their_rows(policy: PolicyServer, make_file: MakeFile) -> None:
    file = make_file(finetuning__num_epochs=1, finetuning__validation={"dataset": "rows.json", "interval": 1})
    await art.finetune.run(file)
    await art.finetune.evaluate(file)
    assert [body["split"] for body in policy.logged if body["groups"]][-1] == "eval"
    logged = [body for body in policy.logged if body["split"] in ("val", "eval")]
    assert {body["split"] for body in logged} == {"val", "eval"}
    for body in logged:
        for number, group in enumerate(body["groups"]):
            assert [trajectory["metadata"]["row"] for trajectory in group["trajectories"]] == [f"row {number}"]
            assert group["metadata"] == {"row": f"row {number}"}


NAME = "trainer_adapters.a.backend.name"


async def test_an_evaluation_of_an_unknown_model_is_refused_and_registers_nothing(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    for step, baseline in ((None, None), ("0", None), ("best", "base"), ("base", "0")):
        with pytest.raises(WrongInput, match="no model demo/nosuch; known: demo/agent"):
            await art.finetune.evaluate(make_file(), {NAME: "nosuch"}, step=step, baseline=baseline)
    assert set(policy.steps) == {"demo/agent"} and not policy.asked


async def test_an_evaluation_of_the_base_model_leaves_no_model(policy: PolicyServer, make_file: MakeFile) -> None:
    evaluation = await art.finetune.evaluate(make_file(), {NAME: "nosuch"}, step="base", limit=1)
    assert evaluation.name == "art/tiny" and set(policy.steps) == {"demo/agent"}
    await art.finetune.evaluate(make_file(), step="base", limit=1)
    assert set(policy.steps) == {"demo/agent"}, "a model that was there stays"


async def test_two_evaluations_of_the_base_model_at_once_have_models_of_their_own(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    file = make_file()
    await asyncio.gather(*(art.finetune.evaluate(file, step="base", results=f"{name}.jsonl") for name in "ab"))
    registered = [request.json()["name"] for request in policy.sent("POST", "/api/models")]
    assert len(set(registered)) == 2 and set(policy.steps) == {"demo/agent"}


async def test_what_a_killed_evaluation_of_the_base_model_left_is_deleted_by_a_later_one(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    left, trained, other = (
        "demo/base-1000000000-0123abcd",
        "demo/base-1000000000-0123abce",
        "q/base-1000000000-0123abcd",
    )
    running = f"demo/base-{time.time():.0f}-0123abcd"
    policy.steps |= {left: 0, trained: 1, other: 0, running: 0}
    await art.finetune.evaluate(make_file(), step="base", limit=1)
    assert set(policy.steps) == {"demo/agent", trained, other, running}


# --- differences --------------------------------------------------------------------------------------------------


def result(row: str, reward: float | None, output: Any = "an answer", **more: Any) -> ResultRecord:
    return ResultRecord(
        model=more.pop("model", "demo/agent@1"), id=row, question=f"q {row}", output=output, reward=reward, **more
    )


BEFORE = [result("a", 1.0), result("b", 0.0), result("c", 1.0), result("d", None, error="TimeUp"), result("old", 1.0)]
AFTER = [
    result("a", 0.0, "<script>alert(1)</script>", reasons={"judge": "it is <b>wrong</b>"}, model="demo/agent@2"),
    result("b", 1.0, model="demo/agent@2"),
    result("c", 1.0, model="demo/agent@2"),
    result("d", 1.0, model="demo/agent@2"),
]


def test_a_comparison_says_which_rows_are_worse() -> None:
    comparison = compare(BEFORE, AFTER)
    kinds = {kind: comparison.rows(kind) for kind in ("worse", "better", "equal", "in one only")}
    assert kinds == {"worse": ["a"], "better": ["b"], "equal": ["c"], "in one only": ["d", "old"]}
    assert comparison.difference is not None and comparison.difference.num_scenarios == 3
    assert "rows: 1 worse, 1 better, 1 equal, 2 in one only" in repr(comparison)
    with pytest.raises(WrongInput, match="no row in common"):
        compare(BEFORE, [result("other", 1.0)])


def test_the_page_is_one_file_that_runs_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "eval.html", compare(BEFORE, AFTER), BEFORE, AFTER)
    text = (tmp_path / "eval.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text and "it is &lt;b&gt;wrong&lt;/b&gt;" in text
    assert "http" not in text and "TimeUp" in text and "1 worse" in text


async def test_an_evaluation_is_compared_with_earlier_results(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file()
    policy.answer = lambda question, number: "no"
    await art.finetune.evaluate(file, results="before.jsonl")
    assert not (folder / "out" / "eval.html").exists()
    policy.answer = lambda question, number: "yes"
    evaluation = await art.finetune.evaluate(file, compare="before.jsonl")
    assert "difference 1 (95% 1 to 1, n=4); rows: 0 worse, 4 better" in repr(evaluation.comparison)
    assert evaluation.page == Path("out/eval.html") and len(evaluation.records) == 4
    assert "4 better" in (folder / "out" / "eval.html").read_text()
    everything = (folder / "out" / "eval_results.jsonl").read_text()
    chosen = await art.finetune.evaluate(file, compare="before.jsonl", ids=["row 2"])
    assert "rows: 0 worse, 1 better, 0 equal, 0 in one only" in repr(chosen.comparison)
    assert (folder / "out" / "eval_results.jsonl").read_text() == everything
    assert len(lines(folder / "out" / "eval_chosen_results.jsonl")) == 1


def test_two_files_are_compared_without_a_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, records in (("before.jsonl", BEFORE), ("after.jsonl", AFTER)):
        (folder / name).write_text("".join(record.model_dump_json() + "\n" for record in records))
    run_eval(parsed("eval", "after.jsonl", "--compare", "before.jsonl"))
    assert "rows: 1 worse, 1 better, 1 equal, 2 in one only" in capsys.readouterr().out
    assert "demo/agent@2 compared with demo/agent@1" in (folder / "after.html").read_text()
    with pytest.raises(SystemExit) as ended:
        run_eval(parsed("eval", "after.jsonl", "--compare", "before.jsonl", "--at_least", "0.9"))
    assert ended.value.code == 5


RESULTS_ALONE = [([], 2), (["--at_least", "0.4"], 5), (["--at_least", "0.2"], 0)]


@pytest.mark.parametrize(("arguments", "code"), RESULTS_ALONE)
def test_results_alone_are_gated_or_name_the_flag(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    (folder / "before.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in BEFORE))
    ended = 0
    try:
        run_eval(parsed("eval", "before.jsonl", *arguments))
    except SystemExit as error:
        ended = error.code
    printed = capsys.readouterr()
    assert ended == code
    assert "add --compare FILE, or --at_least X" in printed.err if code == 2 else "reward 0.75 (95%" in printed.out


@pytest.mark.parametrize(("least", "is_below"), [("-0.5", False), ("0.5", True)])
async def test_the_difference_is_gated_and_printed_with_its_page(
    policy: PolicyServer,
    folder: Path,
    make_file: MakeFile,
    capsys: pytest.CaptureFixture[str],
    least: str,
    is_below: bool,
) -> None:
    (folder / "f.yml").write_text(json.dumps(make_file()))
    await art.finetune.evaluate("f.yml", results="before.jsonl")
    policy.answer = lambda question, number: "yes"
    flags = parsed("eval", "f.yml", "--compare", "before.jsonl", "--at_least_difference", least)
    if is_below:
        with pytest.raises(BelowTarget, match=r"the difference 0 .* is below --at_least_difference 0\.5"):
            await evaluate_flags(flags)
    else:
        await evaluate_flags(flags)
    printed = capsys.readouterr().out
    assert re.search(r"difference 0 \(95%.*\), not decided; rows: .*; out/eval.html", printed)
    assert "Evaluation(" not in printed, "the same numbers once"
    with pytest.raises(WrongInput, match="--at_least_difference needs --baseline K or --compare FILE"):
        await evaluate_flags(parsed("eval", "f.yml", "--at_least_difference", "0"))


async def test_a_chosen_row_is_printed_with_its_output_and_reason(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "f.yml").write_text(json.dumps(make_file(REASONED)))
    await evaluate_flags(parsed("eval", "f.yml", "--id", "row 1"))
    printed = capsys.readouterr().out
    assert "no interval from 1 row" in printed and "row 'row 1', repetition 1: reward 1" in printed
    assert "output: yes" in printed and "reason of reward: it said yes" in printed


async def test_the_evaluations_of_the_page_run_in_ci(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file()
    monkeypatch.setenv("ART_SERVER_URL", policy.url)
    section = DOCS.partition("### Evaluations in CI")[2].partition("In a program:")[0]
    (folder / "evaluate.yml").write_text(section.partition("```yaml\n")[2].partition("```")[0])
    rows = json.loads((folder / "rows.json").read_text())
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_file, without_file = re.findall(r"^art (eval .*)$", section, re.MULTILINE)
    policy.steps["ci/words"] = 0
    policy.answer = lambda question, number: "yes"
    await art.finetune.evaluate("evaluate.yml", results="main.jsonl")
    await evaluate_flags(parsed(*shlex.split(with_file)))
    known = set(policy.steps)
    await evaluate_flags(parsed(*shlex.split(without_file)))
    assert set(policy.steps) == known and policy.asked[-1]["step"] == "base"
    with pytest.raises(WrongInput, match="no model finetune/nosuch; known: "):
        await evaluate_flags(parsed(*shlex.split(without_file), "--name", "nosuch"))
    with pytest.raises(WrongInput, match="--step needs --name NAME"):
        await evaluate_flags(parsed(*shlex.split(without_file), "--step", "2"))
    with pytest.raises(WrongInput, match="without a file needs --dataset, --reward"):
        await evaluate_flags(parsed("eval", "agent.py:answer", "--base_model", "art/tiny"))


async def test_the_base_is_evaluated_on_the_rows_that_training_holds_out(
    policy: PolicyServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_SERVER_URL", policy.url)
    flags = ("agent.py:answer", "--dataset", "rows.json", "--reward", "agent.py:score", "--base_model", "art/tiny")
    await evaluate_flags(parsed("eval", *flags, "--validation_share", "0.25"))
    (held_out,) = {body["messages"][-1]["content"] for body in policy.asked}
    await art.finetune.run(*_input(parsed("finetune", *flags, "--validation_share", "0.25", "--num_epochs", "1")))
    groups = [group["trajectories"] for body in policy.trained for group in body["groups"]]
    trained = {trajectory["messages_and_choices"][0]["content"] for group in groups for trajectory in group}
    assert len(trained) == 3 and held_out not in trained


async def test_the_results_of_a_baseline_are_compared_too(folder: Path, make_file: MakeFile) -> None:
    file = make_file()
    await art.finetune.run(file)
    await art.finetune.evaluate(file, baseline="0")
    assert "demo/agent@2 compared with demo/agent@0" in (folder / "out" / "eval.html").read_text()
    assert {record.model for record in read_results(folder / "out" / "eval_results.jsonl")} == {"demo/agent@2"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no results"),
        ("{}\n", "line 1 is no result"),
        ("no json\n", "line 1 is no result"),
        (None, "no such file"),
    ],
)
async def test_wrong_results_are_named_before_the_server_is_asked(
    policy: PolicyServer, folder: Path, make_file: MakeFile, text: str | None, words: str
) -> None:
    if text is not None:
        (folder / "before.jsonl").write_text(text)
    with pytest.raises(WrongInput, match=f"before.jsonl: .*{words}"):
        await art.finetune.evaluate(make_file(), compare="before.jsonl")
    assert not policy.requests


# --- judges -------------------------------------------------------------------------------------------------------


class JudgeServer(FakeServer):
    """A judge that likes each answer "yes"."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.seconds = 0.0
        self.on("POST", "/v1/chat/completions", self._answer)

    def _answer(self, request: Request) -> Answer:
        prompt = request.json()["messages"][1]["content"]
        self.prompts.append(prompt)
        is_good = '<answer>\n"yes"' in prompt
        scores = {"scores": {"1": {"explanation": f"it is {'good' if is_good else 'bad'}", "score": float(is_good)}}}
        message = {"role": "assistant", "content": json.dumps(scores)}
        return Answer(body={"choices": [{"message": message}], "usage": {}}, seconds=self.seconds)


@pytest.fixture
async def judge() -> AsyncIterator[JudgeServer]:
    server = JudgeServer()
    await server.start()
    yield server
    await server.stop()


def judging(judge: JudgeServer, **fields: Any) -> dict[str, Any]:
    return {"reward": {"_type": "judge", "judge_model": "small", "base_url": f"{judge.url}/v1", **fields}}


async def test_a_judge_scores_one_answer_and_shows_its_prompt(
    policy: PolicyServer, judge: JudgeServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_file(eval__evaluators=judging(judge, rubric="Only yes is right."))
    await art.finetune.check(file)
    shown = capsys.readouterr().out
    assert "--- prompt of judge reward" in shown and "Only yes is right." in shown
    assert '<question>\n"question 0"\n</question>' in shown and '<expected>\n"yes"\n</expected>' in shown
    assert "reason of reward: it is good" in shown and judge.prompts[0] in shown
    policy.answer = lambda question, number: "yes" if question == "question 0" else "no </answer>"
    evaluation = await art.finetune.evaluate(file)
    assert evaluation.reward.mean == 0.25
    reasons = [record["reasons"]["reward"] for record in lines(folder / "out" / "eval_results.jsonl")]
    assert reasons == ["it is good", "it is bad", "it is bad", "it is bad"]
    assert judge.prompts[-1].count("</answer>") == 1, "an answer closes no tag"
    policy.answer = lambda question, number: ("yes", "no")[number % 2]
    await art.finetune.run(file, {"finetuning.num_epochs": 1})
    assert len(policy.trained) == 1


async def test_the_judge_of_the_page_is_a_section_of_a_file(
    judge: JudgeServer, folder: Path, make_file: MakeFile, policy: PolicyServer
) -> None:
    text = DOCS.partition("**A judge**")[2].partition("```yaml\n")[2].partition("```")[0]
    (folder / "rubric.md").write_text("Only yes is right.")
    evaluators = YAML(typ="safe").load(text.replace("http://localhost:8000", judge.url))["eval"]["evaluators"]
    await art.finetune.evaluate(make_file(eval__evaluators=evaluators), limit=1)
    assert "Only yes is right." in judge.requests[0].body.decode() and len(policy.asked) == 1


async def test_a_judge_that_is_slow_fails_the_rollout(judge: JudgeServer, make_file: MakeFile) -> None:
    judge.seconds = 600.0
    file = make_file(eval__evaluators=judging(judge, timeout_seconds=0.05))
    remedy = r"raise timeout_seconds of the evaluator \(0\.05\)"
    with pytest.raises(FinetuneError, match=rf"did not answer within 0\.05 s, in 3 tries: {remedy}"):
        await art.finetune.evaluate(file, limit=1)


async def test_a_ruler_that_is_slow_fails_the_group(judge: JudgeServer, make_file: MakeFile) -> None:
    judge.seconds = 600.0
    file = make_file(eval__evaluators=judging(judge, _type="ruler", timeout_seconds=0.05), finetuning__num_epochs=1)
    remedy = r"raise timeout_seconds of the evaluator \(0\.05\)"
    with pytest.raises(FinetuneError, match=rf"did not answer within 0\.05 s, in 3 tries: {remedy}"):
        await art.finetune.run(file)


async def test_the_judges_max_tokens_are_sent(judge: JudgeServer, make_file: MakeFile) -> None:
    await art.finetune.evaluate(make_file(eval__evaluators=judging(judge, max_tokens=99)), limit=1)
    assert judge.requests[-1].json()["max_tokens"] == 99


async def test_wrong_fields_of_a_judge_are_named(judge: JudgeServer, make_file: MakeFile) -> None:
    with pytest.raises(WrongInput, match=r"reward\.max_tokens: must be a number of tokens above 0, not the number 0"):
        await art.finetune.evaluate(make_file(eval__evaluators=judging(judge, max_tokens=0)))
    with pytest.raises(WrongInput, match=r"reward\.timeout_seconds: must be a number of seconds above 0, not the text"):
        await art.finetune.evaluate(make_file(eval__evaluators=judging(judge, timeout_seconds="long")))
    with pytest.raises(
        WrongInput, match=r"reward\.timeout_seconds: must be a number of seconds above 0, not the number 0"
    ):
        await art.finetune.check(make_file(eval__evaluators=judging(judge, _type="ruler", timeout_seconds=0)))
    with pytest.raises(WrongInput, match=r"reward\.model: unknown key: did you mean 'judge_model'"):
        await art.finetune.evaluate(make_file(eval__evaluators=judging(judge, model="x")))


async def test_a_judge_at_openai_has_the_users_own_key(
    policy: PolicyServer, judge: JudgeServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art.finetune.workflows.of_user", {})
    monkeypatch.setenv("OPENAI_BASE_URL", f"{judge.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    file = make_file(eval__evaluators={"reward": {"_type": "judge", "judge_model": "openai/gpt"}})
    await art.finetune.evaluate(file, limit=1)
    assert [request.headers["authorization"] for request in judge.requests] == ["Bearer sk-own"]
    monkeypatch.setattr("art.finetune.workflows.of_user", {"OPENAI_API_KEY": ""})
    policy.requests.clear()
    with pytest.raises(
        WrongInput, match=r"eval\.evaluators\.reward: judge openai/gpt needs a key: set OPENAI_API_KEY before"
    ):
        await art.finetune.evaluate(file, limit=1)
    for name, problem in (("klug", "judge klug needs a key"), ("klug/x", "judge 'klug/x' has no address")):
        overrides = {"eval.evaluators.reward.judge_model": name}
        with pytest.raises(
            WrongInput, match=rf"{problem}.* is base_url of .* \(without a file: --judge_url http://HOST/v1\)"
        ):
            await art.finetune.evaluate(file, overrides)
    assert not policy.requests


LABELLED = [("1", "yes", 1), ("2", "no", "no"), ("3", "yes", False), ("4", "no", 0.2), ("5", "yes", "0.9")]


async def test_a_judge_is_compared_with_labels(judge: JudgeServer, folder: Path, make_file: MakeFile) -> None:
    rows = [{"id": row, "question": "q", "output": output, "label": label} for row, output, label in LABELLED]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = make_file(eval__evaluators=judging(judge))
    measured = await art.finetune.measure_agreement(file, "labels.jsonl")
    assert measured.share.mean == 0.8 and measured.differing == ["3"]
    assert measured.kappa == pytest.approx((0.8 - 0.48) / (1 - 0.48))
    assert "1 differ: 3" in repr(measured)
    records = lines(folder / "out" / "agreement.jsonl")
    assert [(record["label"], record["reward"]) for record in records][2] == (False, 1.0)
    assert records[2]["reasons"] == {"reward": "it is good"}


async def test_results_of_repetitions_are_labels_and_ask_no_server(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file(eval__evaluators={"reward": {"_type": "exact_match"}})
    policy.answer = lambda question, number: ("yes", "no")[number % 2]
    await art.finetune.evaluate(file, reps=2, limit=2)
    labelled = [record | {"label": 1} for record in lines(folder / "out" / "eval_chosen_results.jsonl")]
    (folder / "labels.jsonl").write_text("".join(json.dumps(record) + "\n" for record in labelled))
    await policy.stop()
    measured = await art.finetune.measure_agreement(file, "labels.jsonl")
    assert measured.share.mean == 0.5 and len(measured.records) == 4
    assert {name.partition(" ")[0] for name in measured.differing} == {"row"} and len(measured.differing) == 2
    assert any("(repetition 2)" in name for name in measured.differing)
    (folder / "labels.jsonl").write_text((json.dumps(labelled[0]) + "\n") * 2)
    with pytest.raises(WrongInput, match="line 2 has the id 'row 0' of line 1"):
        await art.finetune.measure_agreement(file, "labels.jsonl")


def test_kappa_of_a_known_table() -> None:
    labels = [True] * 25 + [False] * 25
    scores = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert cohens_kappa(labels, scores) == pytest.approx(0.4)
    assert cohens_kappa([True] * 3, [True] * 3) is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("l.jsonl", '{"question": "q", "output": "a"}', "line 1 has the label None: a label is a number from 0 to 1"),
        ("l.jsonl", '{"question": "q", "output": "a", "label": 4}', "line 1 has the label 4"),
        ("l.txt", "", "a file of labels ends in .jsonl"),
    ],
)
async def test_wrong_labels_are_named_before_the_server_is_asked(
    policy: PolicyServer, folder: Path, make_file: MakeFile, name: str, text: str, words: str
) -> None:
    (folder / name).write_text(text)
    with pytest.raises(WrongInput, match=words):
        await art.finetune.measure_agreement(make_file(), name)
    assert not policy.requests


def test_flags_that_need_a_policy_are_refused_beside_labels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_eval(parsed("eval", "f.yml", "--labels", "l.jsonl", "--step", "3", "--validation-dataset", "v.csv"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "art: --labels asks no policy: leave out --step, --validation_dataset\n"


# --- sampling -----------------------------------------------------------------------------------------------------

SAMPLING = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
LLMS = {"policy": {"_type": "openai", "model_name": "agent", **SAMPLING}}
PROGRAM = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": json.load(sys.stdin)["question"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
KINDS = {
    "captured": "agent.py:answer",
    "llms": "agent.py:with_llms",
    "address": "agent.py:by_address",
    "key": "agent.py:by_key",
    "command": "command",
}
CODE = """
    async def with_llms(question, llms):
        assert llms["policy"].parameters == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
        return await answer(question)

    async def asked(question, **settings):
        messages = [{"role": "user", "content": question}]
        async with AsyncOpenAI(**settings) as client:
            completion = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        return completion.choices[0].message.content

    async def by_address(question, rollout):
        return await asked(question, base_url=rollout.base_url)

    async def by_key(question, rollout):
        return await asked(question, api_key=rollout.api_key)
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_the_policys_sampling_reaches_the_server_from_each_workflow(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    (folder / "program.py").write_text(PROGRAM)
    workflow: dict[str, Any] = {"_type": KINDS[kind]}
    if kind == "command":
        workflow["command"] = [sys.executable, "program.py"]
    await art.finetune.evaluate(make_file(CODE, llms=LLMS, workflow=workflow), limit=1)
    assert [body["sampling"].parameters for body in policy.asked] == [SAMPLING]
    assert "without effect" not in capfd.readouterr().err


async def test_wrong_sampling_is_named(make_file: MakeFile) -> None:
    with pytest.raises(WrongInput, match=r"llms\.policy\.temperature: must be less than or equal to 2"):
        await art.finetune.evaluate(make_file(llms={"policy": LLMS["policy"] | {"temperature": 20}}))


# --- places and progress --------------------------------------------------------------------------------------------


async def test_labels_show_progress_and_name_the_place_of_an_error(
    policy: PolicyServer,
    folder: Path,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("art.bars.SECONDS", 0.0)
    rows = [{"id": row, "question": "q", "output": output, "label": label} for row, output, label in LABELLED]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        r"labels\.jsonl: 5 of 5 answers could not be scored; line 1: KeyError: 'answer' \(agent\.py:\d+\): the labels lack "
        "the column 'answer', which your evaluator reads"
    )
    with pytest.raises(FinetuneError, match=words):
        await art.finetune.measure_agreement(make_file(), "labels.jsonl")
    assert "labels: 100%" in capsys.readouterr().err
    with pytest.raises(
        WrongInput, match=r"labels\.jsonl: no column 'answer', which evaluator 'reward' \(exact_match\)"
    ):
        await art.finetune.measure_agreement(
            make_file(eval__evaluators={"reward": {"_type": "exact_match"}}), "labels.jsonl"
        )
    assert not policy.requests


def test_without_the_extra_no_coroutine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "art.finetune.errors", None)
    with pytest.raises(ModuleNotFoundError):
        run_eval(parsed("eval", "f.yml"))
    gc.collect()  # a coroutine that nobody awaited warns, which is an error here
