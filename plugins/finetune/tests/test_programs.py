"""Programs as workflows and evaluators: what they get, what they print, and what they died of."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art.finetune
from art.finetune import FinetuneError
from art.finetune.programs import cause_of
from plugins.finetune.tests.policy_server import PolicyServer
from tests.processes import wait_until_gone

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]
PYTHON = shlex.quote(sys.executable)

NODE = """\
file:///home/me/agent.mjs:3
throw new TypeError("boom");
      ^

TypeError: boom: no such field
    at file:///home/me/agent.mjs:3:7
    at ModuleJob.run (node:internal/modules/esm/module_job:325:25)

Node.js v20.20.2"""
CAUSES = {
    NODE: "TypeError: boom: no such field",
    "Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'openai'\n    at packageResolve (node:internal)\n  code: 'E'\n}": (
        "Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'openai'"
    ),
    "TypeError: fetch failed\n    at x\n  [cause]: Error: connect ECONNREFUSED 127.0.0.1:1\n      errno: -111": (
        "[cause]: Error: connect ECONNREFUSED 127.0.0.1:1"
    ),
    "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'\n": "KeyError: 'x'",
    'Traceback (most recent call last):\n  File "a.py", line 1\nAssertionError': "AssertionError",
    "sh: 1: nope: not found\n\n": "sh: 1: nope: not found",
    "": "it printed nothing on stderr",
}


@pytest.mark.parametrize(("tail", "cause"), CAUSES.items())
def test_the_line_with_the_cause(tail: str, cause: str) -> None:
    assert cause_of(tail) == cause


FAILING = f"""
import sys
sys.stderr.write({NODE!r})
sys.exit(1)
"""


async def test_a_program_that_fails_says_why(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "agent.mjs").write_text(FAILING)
    command = {"_type": "command", "command": f"{PYTHON} agent.mjs"}
    with pytest.raises(FinetuneError, match=r"ended with exit code 1: TypeError: boom: no such field"):
        await art.finetune.check(make_file(workflow=command))
    assert NODE in capsys.readouterr().err
    with pytest.raises(FinetuneError):
        await art.finetune.run(make_file(workflow=command, finetuning__max_exceptions=100, finetuning__num_epochs=1))
    kept = [json.loads(line)["error"] for line in (folder / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert len(kept) == 8 and all(error.endswith(NODE) for error in kept)
    (row,) = map(json.loads, (folder / "out" / "training_metrics.jsonl").read_text().splitlines())
    assert row["failures"] == {f"{sys.executable} ended with exit code 1: TypeError: boom: no such field": 8}


JUDGE = """
import json, os, sys
asked = json.load(sys.stdin)
is_right = asked["output"] == asked["row"]["answer"]
assert "OPENAI_BASE_URL" not in os.environ, "of the policy"
print(json.dumps({"score": is_right, "reason": "compared"}) if asked["row"]["id"] != "row 0" else float(is_right))
"""


async def test_a_program_is_an_evaluator(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "judge.py").write_text(JUDGE)
    file = make_file(eval__evaluators__reward={"_type": "command", "command": [sys.executable, "judge.py"]})
    await art.finetune.run(file)
    assert policy.steps["demo/agent"] == 2
    rewards = [[trajectory["reward"] for trajectory in group["trajectories"]] for group in policy.trained[0]["groups"]]
    assert sorted(map(sorted, rewards)) == [[0.0, 1.0]] * 4
    await art.finetune.evaluate(file)
    results = [json.loads(line) for line in (folder / "out" / "eval_results.jsonl").read_text().splitlines()]
    assert [result["reasons"] for result in results] == [{}, *([{"reward": "compared"}] * 3)]


PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "javascript.md").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
async def test_the_file_of_the_page_trains_without_python(policy: PolicyServer, folder: Path) -> None:
    for name in ("agent.mjs: no packages", "score.mjs", "finetune.yml"):
        text = PAGE.partition(f" {name}\n")[2].partition("```")[0]
        (folder / name.partition(":")[0]).write_text(text)
    (folder / "train.jsonl").write_text('{"question": "respond with yes, no, maybe", "answer": "maybe"}')
    policy.answer = lambda question, number: ("Maybe.", "no")[number % 2]
    await art.finetune.run("finetune.yml", {"trainer_adapters.adapter.backend.url": policy.url})
    assert policy.steps["howto/javascript"] == 4 and policy.asked[0]["max_tokens"] == 12
    rows = [json.loads(line) for line in (folder / "out" / "training_metrics.jsonl").read_text().splitlines()]
    assert [(row["avg_reward"], row["num_failed"]) for row in rows] == [(0.5, 0)] * 4


BAD_PROGRAMS = {
    "print('good')": r"printed 'good': an evaluator prints a number, or JSON such as",
    "print('NaN')": r"evaluator 'reward' returned nan: a score is a finite number",
    "raise ValueError('no answer')": r"ended with exit code 1: ValueError: no answer",
}


@pytest.mark.parametrize(("code", "reason"), BAD_PROGRAMS.items())
async def test_an_evaluator_that_prints_no_score_fails_the_rollout(make_file: MakeFile, code: str, reason: str) -> None:
    with pytest.raises(FinetuneError, match=reason):
        await art.finetune.run(
            make_file(eval__evaluators__reward={"_type": "command", "command": [sys.executable, "-c", code]})
        )


async def test_an_evaluator_that_takes_too_long_ends_with_its_children(folder: Path, make_file: MakeFile) -> None:
    command = ["bash", "-c", "sleep 1000 & echo $! >> pids; wait"]
    file = make_file(
        eval__evaluators__reward={"_type": "command", "command": command},
        eval__general__rollout_timeout_seconds=5.0,
        eval__general__max_concurrency=1,
    )
    with pytest.raises(FinetuneError, match="evaluator 'reward' took longer than 5 s: raise"):
        await art.finetune.run(file)
    pids = folder / "pids"  # absent if the program had no time to start
    wait_until_gone({int(pid) for pid in pids.read_text().split()} if pids.exists() else set())


async def test_an_answer_inside_of_a_sentence_needs_contains(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.answer = lambda question, number: "I say Yes."
    validation = {"dataset": "rows.json", "interval": 1}
    exact = make_file(eval__evaluators__reward={"_type": "exact_match"}, finetuning__validation=validation)
    with pytest.raises(FinetuneError):
        await art.finetune.run(exact)
    hint = "every reward is 0, and {} outputs contain the row's answer"
    shown = capsys.readouterr().err
    assert shown.count(hint.format(4)) == 3 and shown.count(hint.format(8)) == 2, "validations, and epochs"
    await art.finetune.evaluate(exact)
    assert hint.format(4) in capsys.readouterr().err
    contains = make_file(eval__evaluators__reward={"_type": "contains", "ignore_case": True})
    evaluation = await art.finetune.evaluate(contains)
    assert evaluation.reward.mean == 1.0 and hint.format(4) not in capsys.readouterr().err
