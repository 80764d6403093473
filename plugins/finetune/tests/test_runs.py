"""Runs, against a server that keeps sessions and trains nothing."""

import asyncio
import fcntl
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from art.finetune import FinetuneError, NoServer, NoSignal, WrongInput, losing
from art.finetune.folder import Folder
from art.finetune.run_record import EpochRow, solved_reward
from plugins.finetune.tests.policy_server import PolicyServer
from plugins.finetune.tests.stopped import run_until
from tests.fakes.server import Answer, Request
from tests.processes import wait_until_gone

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_run_trains_each_epoch_once_and_reports_it(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    statuses = await art.finetune.run(make_file())
    assert [status.status for status in statuses] == ["completed"] * 2
    assert policy.steps == {"demo/agent": 2}
    assert [body["expected_step"] for body in policy.trained] == [0, 1]
    assert [len(body["groups"]) for body in policy.trained] == [4, 4]
    rows = lines(folder / "out" / "training_metrics.jsonl")
    assert [(row["epoch"], row["avg_reward"], row["num_trajectories"], row["step"]) for row in rows] == [
        (0, 0.5, 8, 1),
        (1, 0.5, 8, 2),
    ]
    assert [(body["split"], body["metrics"]) for body in policy.logged] == [
        ("epoch", {"epoch/reward": 0.5, "epoch/cut": 0.0})
    ] * 2


async def die(*_: object) -> None:
    raise KeyboardInterrupt


WORKFLOWS = {
    "plain": """
        import openai
        def plain(question):
            messages = [{"role": "user", "content": question}]
            with openai.OpenAI() as client:
                completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
            return completion.choices[0].message.content
    """,
    "by_address": """
        import httpx
        async def by_address(row, rollout, seed):
            assert isinstance(seed, int)
            body = {"model": rollout.model.get_inference_name(), "messages": [{"role": "user", "content": row["question"]}]}
            async with httpx.AsyncClient() as http:
                answer = await http.post(f"{rollout.base_url}/chat/completions", json=body)
            return answer.json()["choices"][0]["message"]["content"]
    """,
    "by_client": """
        import httpx
        async def by_client(question):
            body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}]}
            async with httpx.AsyncClient(verify=False) as http:
                answer = await http.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body)
            return answer.json()["choices"][0]["message"]["content"]
    """,
    "by_llms": """
        import httpx
        def by_llms(question, llms):
            llm = llms["policy"]
            body = {"model": llm.model, "messages": [{"role": "user", "content": question}]}
            answer = httpx.post(f"{llm.base_url}/chat/completions", json=body)
            return answer.json()["choices"][0]["message"]["content"]
    """,
}


async def test_each_trajectory_has_its_own_rows_marker(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    rows = [{"question": f"marker {number}", "answer": "yes"} for number in range(100)]
    (folder / "rows.json").write_text(json.dumps(rows))
    file = make_file(
        WORKFLOWS["by_client"],
        workflow___type="agent.py:by_client",
        eval__general__max_concurrency=64,
        trajectory_builders__b__num_generations=4,
        finetuning__num_epochs=1,
    )
    await art.finetune.run(file)
    (request,) = policy.trained
    for number, group in enumerate(request["groups"]):
        asked = {trajectory["messages_and_choices"][0]["content"] for trajectory in group["trajectories"]}
        assert asked == {f"marker {number}"} and len(group["trajectories"]) == 4


IN_THREADS = """
    import json, subprocess, sys, threading, urllib.request
    from concurrent.futures import ThreadPoolExecutor

    def ask_with_urllib(question):
        body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def in_threads(question):
        thread = threading.Thread(target=ask_with_urllib, args=("a thread's",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask_with_urllib, ["a pool's", "a pool's, too"]))
        return ask_with_urllib(question)

    def by_program(question):
        program = f"import agent; print(agent.ask_with_urllib({question!r}))"
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    def half_by_program(question):
        by_program(question)
        return ask_with_urllib(question)
"""


async def test_requests_of_urllib_and_of_threads_that_a_workflow_starts_are_captured(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    file = make_file(IN_THREADS, workflow___type="agent.py:in_threads", finetuning__num_epochs=1)
    await art.finetune.run(file)
    (request,) = policy.trained
    for group in request["groups"]:
        for trajectory in group["trajectories"]:
            assert len(trajectory["additional_histories"]) == 3
    assert policy.num_unnamed == 0


async def test_requests_that_came_without_their_rollout_are_on_the_epoch_s_line(
    policy: PolicyServer, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_file(IN_THREADS, workflow___type="agent.py:half_by_program", finetuning__num_epochs=1)
    await art.finetune.run(file)
    assert policy.num_unnamed == 8
    assert "8 requests came without their rollout" in capsys.readouterr().err


async def test_a_rollout_whose_requests_all_came_without_it_is_told_so(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    file = make_file(IN_THREADS, workflow___type="agent.py:by_program")
    with pytest.raises(FinetuneError, match=r"name no session.*the rollout's base_url"):
        await art.finetune.run(file)


@pytest.mark.parametrize("name", WORKFLOWS)
async def test_any_function_is_a_workflow(policy: PolicyServer, make_file: MakeFile, name: str) -> None:
    await art.finetune.run(make_file(WORKFLOWS[name], workflow___type=f"agent.py:{name}"))
    assert policy.steps["demo/agent"] == 2
    assert all(body["model"] == "demo/agent" for body in policy.asked)


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["question"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def test_a_program_is_a_workflow(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    (folder / "program.py").write_text(PROGRAM)
    await art.finetune.run(make_file(workflow={"_type": "command", "command": "python program.py"}))
    assert policy.steps["demo/agent"] == 2


async def test_what_fails_is_no_reward(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    code = """
        def picky(row, output):
            return {"question 0": None, "question 1": float("nan"), "question 2": "0.5"}.get(row["question"], output == "yes")
    """
    with pytest.raises(FinetuneError, match="evaluator 'reward'"):
        await art.finetune.run(make_file(code, eval__evaluators={"reward": {"_type": "agent.py:picky"}}))
    assert not policy.trained
    await art.finetune.run(
        make_file(eval__evaluators={"reward": {"_type": "agent.py:picky"}}, finetuning__max_exceptions=20), fresh=True
    )
    rows = lines(folder / "out" / "training_metrics.jsonl")
    assert [(row["num_trajectories"], row["num_failed"], row["avg_reward"]) for row in rows] == [(2, 6, 0.5)] * 2
    assert sum(rows[0]["failures"].values()) == 6
    assert [len(body["groups"]) for body in policy.trained] == [1, 1]


@pytest.mark.parametrize("exits", ["workflow", "thread", "evaluator"])
async def test_code_that_exits_fails_its_rollout(
    policy: PolicyServer, folder: Path, make_file: MakeFile, exits: str
) -> None:
    code = """
        import asyncio, sys
        async def workflow(question):
            output = await answer(question)
            sys.exit(3) if question == "question 3" else None
            return output
        def thread(question):
            sys.exit(0) if question == "question 3" else None
            return asyncio.run(answer(question))
        def evaluator(row, output):
            sys.exit(2) if row["question"] == "question 3" else None
            return score(row, output)
    """
    changed = (
        {"eval__evaluators": {"reward": {"_type": "agent.py:evaluator"}}}
        if exits == "evaluator"
        else {"workflow___type": f"agent.py:{exits}"}
    )
    await art.finetune.run(make_file(code, finetuning__max_exceptions=2, finetuning__num_epochs=1, **changed))
    (row,) = lines(folder / "out" / "training_metrics.jsonl")
    assert (row["num_trajectories"], row["num_failed"]) == (6, 2)
    assert all("SystemExit" in reason for reason in row["failures"])
    kept = lines(folder / "out" / "rollouts.jsonl")
    assert sum(1 for rollout in kept if "SystemExit" in (rollout.get("error") or "")) == 2


async def test_a_rollout_that_takes_too_long_fails_with_its_children(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    command = ["bash", "-c", "sleep 1000 & echo $! >> pids; wait"]
    file = make_file(
        workflow={"_type": "command", "command": command},
        eval__general__rollout_timeout_seconds=1.0,
        eval__general__max_concurrency=1,
    )
    with pytest.raises(FinetuneError, match="rollout_timeout_seconds"):
        await art.finetune.run(file)
    pids = folder / "pids"  # absent if the program had no second to start
    wait_until_gone({int(pid) for pid in pids.read_text().split()} if pids.exists() else set())


async def test_requests_that_went_elsewhere_are_told_where_to_go(policy: PolicyServer, make_file: MakeFile) -> None:
    code = """
        def silent(question):
            return "yes"
    """
    with pytest.raises(FinetuneError, match=f"OPENAI_BASE_URL={policy.url}/v1"):
        await art.finetune.run(make_file(code, workflow___type="agent.py:silent"))


async def test_requests_for_the_base_model_are_told_so(policy: PolicyServer, make_file: MakeFile) -> None:
    code = """
        def silent(question):
            return "yes"
    """
    policy.num_base_answers = 1
    with pytest.raises(FinetuneError, match=r"1 of its answers came from the base model art/tiny.*model='demo/agent'"):
        await art.finetune.run(make_file(code, workflow___type="agent.py:silent"))


FUNCTIONS = """
    import art.finetune
    async def planned(question):
        plan = await answer("plan " + question)
        with art.finetune.function("worker"):
            return await answer(question)
"""


@pytest.mark.parametrize(("targets", "asked"), [(["<workflow>"], "plan question 0"), (["worker"], "question 0")])
async def test_answers_of_target_functions_are_trained(
    policy: PolicyServer, make_file: MakeFile, targets: list[str], asked: str
) -> None:
    file = make_file(
        FUNCTIONS,
        workflow___type="agent.py:planned",
        finetuning__target_functions=targets,
        eval__general__max_concurrency=1,
    )
    await art.finetune.run(file)
    for trajectory in policy.trained[0]["groups"][0]["trajectories"]:
        assert trajectory["messages_and_choices"][0]["content"] == asked
        assert not trajectory["additional_histories"] and trajectory["metrics"]["untrained_answers"] == 1


async def test_functions_that_are_never_called_are_named(policy: PolicyServer, make_file: MakeFile) -> None:
    file = make_file(FUNCTIONS, workflow___type="agent.py:planned", finetuning__target_functions=["other"])
    with pytest.raises(FinetuneError, match="<workflow>, worker"):
        await art.finetune.run(file)


async def test_weights_combine_evaluators(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    code = """
        def with_metrics(output):
            return {"score": len(output), "metrics": {"length": len(output)}, "turn_rewards": [0.5]}
    """
    evaluators = {"exact": {"_type": "exact_match"}, "length": {"_type": "agent.py:with_metrics"}}
    reward = {"weights": {"exact": 2.0, "length": -0.1}}
    await art.finetune.run(make_file(code, eval__evaluators=evaluators, finetuning__reward_function=reward))
    trajectories = policy.trained[0]["groups"][0]["trajectories"]
    assert sorted(trajectory["reward"] for trajectory in trajectories) == pytest.approx([-0.2, 1.7])
    assert all(
        trajectory["turn_rewards"] == [0.5] and trajectory["metrics"]["length"] in (2, 3) for trajectory in trajectories
    )


async def test_a_killed_run_samples_only_what_is_missing(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file(eval__general__max_concurrency=1)

    await run_until(policy, file, 6)
    assert not policy.trained
    await art.finetune.run(file)
    assert len(policy.asked) == 6 + 3 + 8
    rows = lines(folder / "out" / "training_metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0, 1] and len(policy.trained) == 2
    assert not await art.finetune.run(file), "complete already"
    assert len(policy.asked) == 17


async def test_a_run_that_was_killed_behind_its_train_call_gets_the_same_job(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call is the same to the last byte, also where a rollout failed and where evaluators add metrics."""
    fails = "def score(row, output):\n    if row['id'] == 'row 0' and output == 'maybe':\n        raise ValueError('bad', 1)\n"
    agent = (folder / "agent.py").read_text().partition("def score")[0]
    scored = "    return {'score': float(output == row['answer']), 'metrics': {'length': len(output), 'a': 0.1}}\n"
    (folder / "agent.py").write_text(agent + fails + scored)
    policy.answer = lambda question, number: ("yes", "no", "maybe")[number % 3]
    file = make_file(finetuning__max_exceptions=0.5, trajectory_builders__b__num_generations=3)
    with monkeypatch.context() as patch:
        patch.setattr(art.finetune.ArtTrainer, "_finish", die)
        with pytest.raises(KeyboardInterrupt):
            await art.finetune.run(file)
    assert policy.steps["demo/agent"] == 1
    await art.finetune.run(file)
    assert policy.steps["demo/agent"] == 2 and len(policy.jobs) == 2


def begun_anew(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was said of epochs that are begun anew, since the last look."""
    return [line for line in capsys.readouterr().err.splitlines() if "begun anew" in line]


def move(policy: PolicyServer, step: int) -> None:
    """As a roll back, which lets the keys of later steps go, or another program's train call."""
    policy.steps["demo/agent"] = step
    forgotten = [key for key, job_step in policy.jobs.items() if job_step > step]
    for key in forgotten:
        del policy.jobs[key], policy.bodies[key]


@pytest.mark.parametrize("step", [0, 2])
async def test_an_epoch_that_was_cut_is_begun_anew_where_the_model_has_moved(
    policy: PolicyServer, make_file: MakeFile, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    file = make_file(eval__general__max_concurrency=1)
    await run_until(policy, file, 8 + 3)
    move(policy, step)
    assert len(await art.finetune.run(file)) == 1
    (line,) = begun_anew(capsys)
    assert "epoch 2" in line and f"step {step}" in line and "2 finished rollouts" in line
    assert len(policy.asked) == 8 + 3 + 8 and policy.steps["demo/agent"] == step + 1
    assert policy.trained[-1]["expected_step"] == step


@pytest.mark.parametrize("step", [0, 1, 3])
async def test_an_epoch_whose_train_call_may_have_been_made_asks_for_its_job_first(
    policy: PolicyServer,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    await art.finetune.run(make_file(), {"finetuning.num_epochs": 1})
    with monkeypatch.context() as patch:
        patch.setattr(art.finetune.ArtTrainer, "_finish", die)
        with pytest.raises(KeyboardInterrupt):
            await art.finetune.run(make_file())
    move(policy, step)  # back to the epoch's step 1: trained again from its rollouts; on to 3: it was trained already
    assert len(await art.finetune.run(make_file())) == 1
    assert len(begun_anew(capsys)) == (step == 0)
    assert len(policy.asked) == (24 if step == 0 else 16)
    assert policy.steps["demo/agent"] == {0: 1, 1: 2, 3: 3}[step]


REFUSED = {
    "request": Answer(422, {"error": {"message": "no", "code": "refused"}}),
    "job": {"message": "no", "code": "trainer_died", "retryable": True},
}


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
async def test_a_mended_program_trains_after_an_epoch_that_cannot_be_trained(
    policy: PolicyServer, make_file: MakeFile, capsys: pytest.CaptureFixture[str], refusal: Any
) -> None:
    """The first start ends with the error, the second asks once more and then begins the epoch anew."""
    train = policy.train

    def strict(request: Any, model: str) -> Answer:
        is_broken = b"broken" in request.body
        if is_broken and isinstance(refusal, Answer):
            return refusal
        policy.job_error = refusal if is_broken else None
        return train(request, model)

    policy.train = strict  # type: ignore[method-assign]
    policy.answer = lambda question, number: ("yes", "broken")[number % 2]
    with pytest.raises(FinetuneError, match="epoch 1 was not trained"):
        await art.finetune.run(make_file())
    assert not begun_anew(capsys)
    policy.answer = lambda question, number: ("yes", "no")[number % 2]
    assert len(await art.finetune.run(make_file())) == 2
    (line,) = begun_anew(capsys)
    assert "8 finished rollouts" in line and policy.steps["demo/agent"] == 2
    assert len(await art.finetune.run(make_file(), {"finetuning.num_epochs": 3})) == 1 and not begun_anew(capsys)


async def test_rollouts_are_kept_while_the_server_only_asks_to_wait(
    policy: PolicyServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(art, "Backend", functools.partial(art.Backend, reconnect_seconds=0))
    full = Answer(429, {"error": {"message": "full", "code": "queue_full", "retryable": True}})
    policy.on("POST", "/api/models/demo/agent/train", full)
    for _ in range(2):
        with pytest.raises(FinetuneError, match="full"):
            await art.finetune.run(make_file())
    policy.routes.clear()
    policy.on("GET", "/health", Answer(body={"status": "ok"}))
    assert len(await art.finetune.run(make_file())) == 2
    assert len(policy.asked) == 16 and not begun_anew(capsys)


async def test_finished_rollouts_whose_answers_the_server_lost_are_sampled_anew(
    policy: PolicyServer, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_file(eval__general__max_concurrency=1, finetuning__num_epochs=1)
    await run_until(policy, file, 6)
    policy.sessions.clear()
    await art.finetune.run(file)
    assert "5 finished rollouts were sampled anew" in capsys.readouterr().err
    assert len(policy.asked) == 6 + 8
    answers = [
        len(trajectory["messages_and_choices"])
        for group in policy.trained[0]["groups"]
        for trajectory in group["trajectories"]
    ]
    assert answers == [2] * 8


async def test_another_configuration_is_refused_and_more_epochs_are_not(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    await art.finetune.run(make_file())
    with pytest.raises(WrongInput, match="num_generations"):
        await art.finetune.run(make_file(trajectory_builders__b__num_generations=3))
    assert len(await art.finetune.run(make_file(), {"finetuning.num_epochs": 3})) == 1


async def test_a_fresh_run_begins_from_the_base_model(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    await art.finetune.run(make_file())
    remedy = r"to begin from the base model, set another trainer_adapters\.a\.backend\.name \(without a file: --name agent-2\)"
    with pytest.raises(WrongInput, match=f"--fresh begins .* demo/agent is at step 2: {remedy}"):
        await art.finetune.run(make_file(), fresh=True)
    assert not (folder / "out.1").exists()
    await art.finetune.run(make_file(trainer_adapters__a__backend__name="agent-2"), fresh=True)
    assert (folder / "out.1" / "state.json").exists() and policy.steps == {"demo/agent": 2, "demo/agent-2": 2}
    await art.finetune.run(make_file(finetuning__output_dir="other"))
    assert re.search(f"demo/agent exists: it is trained further from step 2; {remedy}", capsys.readouterr().err)


FREE = {
    "eval.general.rollout_timeout_seconds": 100,
    "eval.general.max_concurrency": 3,
    "finetuning.max_exceptions": 0.5,
    "finetuning.validation.interval": 5,
    "finetuning.validation.reps": 2,
    "finetuning.validation.dataset": "rows.json",
    "finetuning.target_functions": ["<workflow>"],
    "finetuning.curriculum_learning.enabled": False,
    "trajectory_builders.b.num_generations": 2,
    "trainer_adapters.a.backend.delete_old_checkpoints": True,
    "trainer_adapters.a.backend.server_config": {"a": 1},
    "trainer_adapters.a.training.learning_rate": 5e-6,
    "eval.evaluators.other": {"_type": "exact_match"},
    "eval.general.output_dir": "elsewhere",
    "eval.general.dataset.id_key": "id",
    "eval.general.dataset.file_path": "moved.json",
    "workflow.llm": "policy",
}


async def test_what_does_not_change_what_is_trained_refuses_no_folder(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file()
    await art.finetune.run(file)
    (folder / "moved.json").write_text((folder / "rows.json").read_text())
    for name, value in FREE.items():
        assert not await art.finetune.run(file, {name: value}), f"{name}: complete already"
    backend = {key: value for key, value in file["trainer_adapters"]["a"]["backend"].items() if key != "url"}
    moved = {"trainer_adapters.a.backend": {**backend, "ip": "localhost", "port": policy.port}}
    assert len(await art.finetune.run(file, {"finetuning.num_epochs": 3, **moved})) == 1


TRAINED = {
    "trajectory_builders.b.num_generations": 3,
    "finetuning.seed": 3,
    "trainer_adapters.a.training.learning_rate": 1e-3,
    "trainer_adapters.a.training.preset": "dapo",
    "trainer_adapters.a.backend.name": "other",
    "eval.evaluators.reward._type": "exact_match",
    "finetuning.curriculum_learning.enabled": True,
    "workflow._type": "agent.py:other",
}


async def test_what_changes_what_is_trained_refuses_the_folder(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file("async def other(question): ...\n")
    await art.finetune.run(file)
    for name, value in TRAINED.items():
        with pytest.raises(WrongInput) as refused:
            await art.finetune.run(file, {name: value})
        assert name in str(refused.value) and "--fresh" in refused.value.problems[-1]


def rewrite(folder: Path, old: str, new: str) -> None:
    """Changes the code of the agent, as between two commands."""
    code = (folder / "agent.py").read_text()
    assert old in code
    (folder / "agent.py").write_text(code.replace(old, new))
    del sys.modules["agent"]


async def test_another_reward_is_refused_and_another_workflow_is_told_once(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_file()
    await art.finetune.run(file)
    rewrite(folder, "messages = [{", "messages = 1 * [{")
    for epochs in (3, 4):
        await art.finetune.run(file, {"finetuning.num_epochs": epochs})
    assert capsys.readouterr().err.count("the code of agent.py:answer has changed") == 1
    rewrite(folder, 'row["answer"]', '"no"')
    with pytest.raises(WrongInput) as refused:
        await art.finetune.run(file, {"finetuning.num_epochs": 5})
    first, last = refused.value.problems
    assert (
        first.startswith("agent.py:score: the code of this reward") and "--fresh" in last and len(policy.trained) == 4
    )


async def test_a_reward_that_is_mended_before_the_first_step_scores_all_rollouts_anew(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file(eval__general__max_concurrency=1)
    await run_until(policy, file, 5)
    rewrite(folder, "return float(", "return 2 * float(")
    await art.finetune.run(file)
    rewards = [row["avg_reward"] for row in lines(folder / "out" / "training_metrics.jsonl")]
    assert rewards == [1.0, 1.0]


async def test_a_remedy_for_rollouts_that_take_too_long_can_be_followed(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    code = """
        import asyncio
        async def slow(question):
            await asyncio.sleep(0 if os.path.exists("fast") else 3600)
            return await answer(question)
    """
    file = make_file(code, workflow___type="agent.py:slow", eval__general__rollout_timeout_seconds=0.1)
    with pytest.raises(FinetuneError, match="rollout_timeout_seconds"):
        await art.finetune.run(file)
    (folder / "fast").touch()
    assert len(await art.finetune.run(file, {"eval.general.rollout_timeout_seconds": 100})) == 2


def write_rows(folder: Path, questions: list[str], *, has_ids: bool) -> None:
    rows = [{"question": question, "answer": "yes"} for question in questions]
    if has_ids:
        rows = [{"id": f"row {number}", **row} for number, row in enumerate(rows)]
    (folder / "rows.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("has_ids", [True, False])
async def test_rows_that_changed_under_a_run_are_noticed_by_their_content(
    policy: PolicyServer, folder: Path, make_file: MakeFile, has_ids: bool
) -> None:
    before = ["a", "b", "c", "d"]
    write_rows(folder, before, has_ids=has_ids)
    file = make_file(eval__general__max_concurrency=1)
    await run_until(policy, file, 5)
    for after in (["e", "f", "g", "h"], ["x", *before], before[:3]):
        write_rows(folder, after, has_ids=has_ids)
        with pytest.raises(WrongInput, match="rows are not those that the run in the folder began with"):
            await art.finetune.run(file)
    assert len(policy.asked) == 5
    write_rows(folder, before, has_ids=has_ids)
    assert len(await art.finetune.run(file)) == 2
    contents = [
        sorted({trajectory["messages_and_choices"][0]["content"] for trajectory in group["trajectories"]})
        for group in policy.trained[0]["groups"]
    ]
    assert contents == [["a"], ["b"], ["c"], ["d"]]


async def test_a_validation_with_other_rows_begins_anew(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file(eval__general__max_concurrency=1, finetuning__validation={"dataset": "val.json"})
    (folder / "val.json").write_text(
        json.dumps([{"question": f"old {number}", "answer": "yes"} for number in range(4)])
    )
    await run_until(policy, file, 3)
    (folder / "val.json").write_text(
        json.dumps([{"question": f"new {number}", "answer": "yes"} for number in range(4)])
    )
    await art.finetune.run(file)
    asked = [body["messages"][-1]["content"] for body in policy.asked[3:7]]
    assert asked == [f"new {number}" for number in range(4)]


async def test_equal_rewards_in_all_epochs_are_an_error(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    policy.answer = lambda *_: "yes"
    with pytest.raises(NoSignal) as caught:
        await art.finetune.run(make_file())
    assert caught.value.exit_code == 3 and not policy.trained
    assert (
        str(caught.value)
        == "nothing was trained, because all rewards are 1: the model seems to solve these rows already"
    )
    assert len(lines(folder / "out" / "training_metrics.jsonl")) == 2


async def test_solved_rows_are_told_once_and_are_no_fault_of_the_data(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.answer = lambda _, number: "yes" if policy.trained else ("yes", "no")[number % 2]
    await art.finetune.run(make_file(), {"finetuning.num_epochs": 3})
    text = capfd.readouterr().err
    assert text.count("all rewards are 1, the highest of the run: these rows seem solved, and training can stop") == 1
    assert "rewards did not rise" not in text


SLOW = (
    "another learning_rate than 5e-6, the default: docs/howto/hyperparameters.md begins with 1e-4 for models from 0.5B"
)


async def test_the_learning_rate_is_told_at_the_beginning_and_where_rewards_do_not_rise(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    await art.finetune.run(make_file())
    text = capfd.readouterr().err
    assert "learning rate 5e-6 (the default)\n" in text and "rewards did not rise" in text and SLOW in text
    await art.finetune.run(
        make_file(),
        {
            "trainer_adapters.a.training.learning_rate": 2e-5,
            "finetuning.output_dir": "other",
            "trainer_adapters.a.backend.name": "b",
        },
    )
    text = capfd.readouterr().err
    assert "learning rate 2e-5\n" in text and "another learning_rate than 2e-5, and check" in text


@pytest.mark.parametrize("is_validated", [True, False])
async def test_a_collapse_is_told_at_the_end(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str], is_validated: bool
) -> None:
    policy.answer = lambda _, number: "no" if policy.trained else ("yes", "no")[number % 2]
    validation: dict[str, Any] = {"dataset": "rows.json"} if is_validated else {}
    await art.finetune.run(make_file(finetuning__validation=validation, finetuning__rows_per_step=2))
    text = capfd.readouterr().err
    assert "all answers are the same now: lower the learning rate, which was 5e-6" in text
    fall = "validation fell from 1 (95% 0.5101 to 1, n=4) to 0 (95% 0 to 0.4899, n=4); the best step is "
    assert (fall in text) is is_validated
    assert "reward 0.2500 in epoch 1, 0.0000 in epoch 2; " in text, "the same rows are compared"


@pytest.mark.parametrize(
    ("rewards", "solved"),
    [
        ([(1, 1)], 1),
        ([(0, 0)], None),
        ([(0.5, 0.5)], None),
        ([(0, 0.5), (0.5, 0.5)], 0.5),
        ([(0, 1), (0.5, 0.5)], None),
        ([(-1, -1), (0, 0)], 0),
        ([(None, None)], None),
        ([(0, 1), (None, None)], None),
    ],
)
def test_rows_are_solved_where_all_rewards_are_the_highest(
    rewards: list[tuple[Any, Any]], solved: float | None
) -> None:
    assert solved_reward([EpochRow.model_construct(min_reward=low, max_reward=high) for low, high in rewards]) == solved


async def test_one_generation_is_compared_with_the_batch(policy: PolicyServer, make_file: MakeFile) -> None:
    policy.answer = lambda question, _: ("yes", "no")[int(question[-1]) % 2]
    await art.finetune.run(make_file(trajectory_builders__b__num_generations=1))
    assert (policy.trained[0]["config"]["baseline"], policy.trained[0]["config"]["scaling"]) == ("none", "batch_std")
    assert [len(group["trajectories"]) for group in policy.trained[0]["groups"]] == [1] * 4


async def test_no_server_and_a_failed_job_have_their_own_errors(policy: PolicyServer, make_file: MakeFile) -> None:
    policy.job_error = {"message": "CUDA out of memory. Lower --max-tokens-per-micro-batch", "code": "out_of_memory"}
    with pytest.raises(FinetuneError, match="--max-tokens-per-micro-batch") as failed:
        await art.finetune.run(make_file())
    assert failed.value.exit_code == 1
    policy.job_error, num_asked = None, len(policy.asked)
    assert len(await art.finetune.run(make_file())) == 2, "the same command tries again"
    assert len(policy.asked) == num_asked + 8, "with the rollouts that it has"
    await policy.stop()
    with pytest.raises(NoServer, match="art-server") as lost:
        await art.finetune.run(make_file(finetuning__num_epochs=3))
    assert lost.value.exit_code == 4


@pytest.mark.parametrize(
    ("is_frozen", "is_validated"), [(True, False), (False, True)], ids=["frozen-rollouts", "dead-validation"]
)
async def test_a_server_that_is_lost_at_any_moment_has_its_own_error(
    policy: PolicyServer,
    folder: Path,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    is_frozen: bool,
    is_validated: bool,
) -> None:
    monkeypatch.setattr(losing, "HEALTH_SECONDS", 1.0)
    code = """
        import openai
        async def asks(question):
            messages = [{"role": "user", "content": question}]
            async with AsyncOpenAI(max_retries=0) as client:
                completion = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
            return completion.choices[0].message.content
    """
    validation = {"dataset": "rows.json"} if is_validated else {}
    file = make_file(
        code,
        workflow___type="agent.py:asks",
        finetuning__validation=validation,
        eval__general__rollout_timeout_seconds=5.0 if is_frozen else 600.0,
        finetuning__max_exceptions=0,
    )
    lost = Answer(hang_up=True) if not is_frozen else Answer(after=asyncio.Event())
    num_registered = len(policy.requests)

    def answer(request: Request) -> Answer:
        is_registering = len(policy.requests) < num_registered + 3
        return Answer(body={"status": "ok"}) if is_registering else lost

    def complete(_: Request) -> Answer:
        return lost

    policy.on("GET", "/health", answer)
    policy.on("POST", "/v1/chat/completions", complete)
    with pytest.raises(NoServer, match=f"the server at {policy.url} does not answer .*curl") as caught:
        await art.finetune.run(file)
    assert caught.value.exit_code == 4
    policy.routes.clear()
    policy.on("GET", "/health", Answer(body={"status": "ok"}))
    assert len(await art.finetune.run(file, {"eval.general.rollout_timeout_seconds": 600})) == 2
    if is_validated:
        validations = json.loads((folder / "out" / "validation_history.json").read_text())
        assert not any("error" in row for row in validations)


async def test_validation_before_at_intervals_and_at_the_end(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    validation = {"dataset": "rows.json", "interval": 2}
    await art.finetune.run(make_file(finetuning__num_epochs=3, finetuning__validation=validation))
    rows = json.loads((folder / "out" / "validation_history.json").read_text())
    assert [(row["epoch"], row["step"], row["num_examples"]) for row in rows] == [(0, 0, 4), (2, 2, 4), (3, 3, 4)]
    assert sum(1 for body in policy.logged if body["split"] == "val") == 3


async def test_a_killed_validation_samples_only_what_is_missing(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    file = make_file(
        eval__general__max_concurrency=1, finetuning__validation={"dataset": "rows.json"}, finetuning__num_epochs=1
    )

    await run_until(policy, file, 3)
    await art.finetune.run(file)
    assert len(policy.asked) == 3 + 2 + 8 + 4, "of the first validation the one that was in flight again"
    validations = json.loads((folder / "out" / "validation_history.json").read_text())
    assert [row["num_examples"] for row in validations] == [4, 4]


async def test_a_validation_that_was_cut_holds_answers_of_one_step(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"dataset": "rows.json"}
    file = make_file(eval__general__max_concurrency=1, finetuning__validation=validation, finetuning__num_epochs=1)
    await run_until(policy, file, 3)
    move(policy, 5)
    await art.finetune.run(file)
    assert "2 finished rollouts were sampled anew" in capsys.readouterr().err
    assert len(policy.asked) == 3 + 4 + 8 + 4
    (first, _) = json.loads((folder / "out" / "validation_history.json").read_text())
    assert first["step"] == 5


async def test_a_failed_validation_has_a_reason_and_no_reward(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    code = """
        def broken(output):
            raise RuntimeError("no judge")
    """
    evaluators = {"reward": {"_type": "agent.py:score"}, "broken": {"_type": "agent.py:broken"}}
    validation = {"dataset": "rows.json", "reward": {"name": "broken"}}
    await art.finetune.run(make_file(code, eval__evaluators=evaluators, finetuning__validation=validation))
    rows = json.loads((folder / "out" / "validation_history.json").read_text())
    assert all("no judge" in row["error"] and "avg_reward" not in row for row in rows)
    assert policy.steps["demo/agent"] == 2


async def test_a_table_of_excel_is_told_in_a_line(
    folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.csv").write_bytes("question;answer\nStra\u00dfe?;yes\n".encode("cp1252"))
    dataset = {"_type": "csv", "file_path": "rows.csv"}
    await art.finetune.check(make_file(eval__general__dataset=dataset))
    printed = capsys.readouterr()
    assert "rows.csv: read as Windows-1252, columns separated by semicolons\n" in printed.err
    assert "user: Stra\u00dfe?" in printed.out


async def test_a_check_trains_nothing_and_leaves_the_folder_alone(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    await art.finetune.check(make_file())
    shown = capsys.readouterr().out
    assert "> assistant: yes" in shown and "reward: 1" in shown and "1 answer would be trained" in shown
    assert not policy.trained and not (folder / "out").exists() and len(policy.asked) == 1
    assert policy.asked[0]["model"] == "demo/agent"


async def test_a_check_of_a_new_model_leaves_no_model(policy: PolicyServer, make_file: MakeFile) -> None:
    await art.finetune.check(make_file(trainer_adapters__a__backend__name="new"))
    assert set(policy.steps) == {"demo/agent"} and policy.asked[0]["model"].startswith("demo/base-")


async def test_a_check_tells_a_cut_answer(
    policy: PolicyServer, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.finish_reason = "length"
    await art.finetune.check(make_file())
    assert "the token limit cut 1 of 1 answers: raise max_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("validation", "share"), [({"share": 0.5}, "2 of 2"), ({"dataset": "rows.json"}, "4 of 4")])
async def test_rows_that_are_trained_and_held_out_are_counted(
    folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str], validation: dict[str, Any], share: str
) -> None:
    await art.finetune.check(make_file(finetuning__validation={"share": 0.5}))
    assert "equal to rows of training" not in capsys.readouterr().err
    (folder / "rows.json").write_text(json.dumps([{"question": "same", "answer": "yes"}] * 4))
    await art.finetune.check(make_file(finetuning__validation=validation))
    assert f"{share} held-out rows are equal to rows of training" in capsys.readouterr().err


async def test_an_evaluation_compares_steps(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    file = make_file(finetuning__validation={"dataset": "rows.json"})
    await art.finetune.run(file)
    policy.asked.clear()
    policy.logged.clear()
    evaluation = await art.finetune.evaluate(file, step="best", baseline="0", reps=2)
    assert evaluation.step == 2 and evaluation.baseline is not None and evaluation.difference is not None
    assert {(body["model"], body["step"]) for body in policy.asked} == {("demo/agent", "2"), ("demo/agent", "0")}
    assert len(policy.asked) == 16
    assert {body["split"] for body in policy.logged} == {"eval"}, "the best step stays that of the run's validations"
    figures = json.loads((folder / "out" / "eval.json").read_text())
    assert figures["step"] == 2 and len(figures["difference"]["interval"]) == 2
    with pytest.raises(WrongInput, match="no step 9"):
        await art.finetune.evaluate(file, step="9")


async def test_a_finished_run_says_that_its_model_was_rolled_back(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    file = make_file()
    await art.finetune.run(file)
    await art.finetune.run(file)
    assert "rollback" not in capfd.readouterr().err
    policy.steps["demo/agent"] = 1
    await art.finetune.run(file)
    assert "the model is at step 1 since a rollback; --num_epochs 3 trains further from there" in capfd.readouterr().err
    await art.finetune.run(file, {"finetuning.num_epochs": 3})
    assert policy.steps["demo/agent"] == 2


async def test_a_server_that_runs_in_the_folder_is_used(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    file = make_file(trainer_adapters__a__backend__url=None)
    server_dir = folder / ".art" / ".server"
    server_dir.mkdir(parents=True)
    (server_dir / "address.json").write_text(json.dumps({"url": policy.url, "pid": 1}))
    with (server_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await art.finetune.evaluate(file)
    assert len(policy.asked) == 4 and f"the server that runs in .art is used: {policy.url}" in capfd.readouterr().err


async def test_a_server_that_is_missing_is_named_by_its_variable(
    folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_SERVER_URL", "http://127.0.0.1:1")
    with pytest.raises(NoServer, match="check the address in ART_SERVER_URL"):
        await art.finetune.evaluate(make_file(trainer_adapters__a__backend__url=None))


async def test_results_are_beside_the_configuration_of_a_renamed_folder(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    await art.finetune.run(make_file())
    (folder / "out").rename(folder / "out.1")
    await art.finetune.evaluate("out.1/config.yml")
    assert (folder / "out.1" / "eval.json").exists() and not (folder / "out").exists()
    await art.finetune.evaluate("out.1/config.yml", {"finetuning.output_dir": "other"})
    assert (folder / "other" / "eval_results.jsonl").exists()


async def test_a_share_of_the_rows_is_held_out_and_stays_held_out(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_file(finetuning__validation={"share": 0.25, "interval": 1})
    await art.finetune.run(file)
    questions = {trajectory["messages_and_choices"][0]["content"] for trajectory in trained(policy)}
    assert "1 of 4 rows are held out" in capsys.readouterr().err and len(questions) == 3
    policy.asked.clear()
    await art.finetune.evaluate("out/config.yml")
    assert {body["messages"][-1]["content"] for body in policy.asked}.isdisjoint(questions) and len(policy.asked) == 1
    await art.finetune.run(file, {"finetuning.num_epochs": 3})
    assert {trajectory["messages_and_choices"][0]["content"] for trajectory in trained(policy)} == questions
    with pytest.raises(WrongInput, match=r"finetuning\.validation\.share: 0\.25 in the folder, 0\.5 here"):
        await art.finetune.run(file, {"finetuning.validation.share": 0.5})
    with pytest.raises(WrongInput, match=r"share: a share of 0\.9 leaves none of 4 rows to train"):
        await art.finetune.run(file, {"finetuning.validation.share": 0.9})


def trained(policy: PolicyServer) -> list[dict[str, Any]]:
    return [trajectory for body in policy.trained for group in body["groups"] for trajectory in group["trajectories"]]


async def test_a_column_that_the_function_names_is_the_question(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    rows = [{"ticket": f"ticket {number}", "messages": [], "answer": "yes"} for number in range(2)]
    (folder / "rows.json").write_text(json.dumps(rows))
    file = make_file("async def route(ticket):\n    return await answer(ticket)\n", workflow___type="agent.py:route")
    await art.finetune.evaluate(file)
    assert sorted(body["messages"][-1]["content"] for body in policy.asked) == ["ticket 0", "ticket 1"]


async def test_the_configuration_that_a_run_leaves_is_a_file_without_its_keys(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation = {"dataset": "rows.json"}
    file = make_file(trainer_adapters__a__backend__api_key="sk-own", finetuning__validation=validation)
    await art.finetune.run(file)
    assert {request.headers["authorization"] for request in policy.requests} == {"Bearer sk-own"}
    policy.requests.clear()
    monkeypatch.setenv("ART_API_KEY", "sk-variable")
    assert (await art.finetune.evaluate("out/config.yml")).step == 2
    assert {request.headers["authorization"] for request in policy.requests} == {"Bearer sk-variable"}


async def test_failed_rollouts_are_tried_again_only_if_they_ended_the_run(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        async def picky(question):
            output = await answer(question)
            if question == "question 3" and os.path.exists("ill"):
                raise RuntimeError("ill")
            return output
    """
    file = make_file(code, workflow___type="agent.py:picky", finetuning__max_exceptions=2, finetuning__num_epochs=1)
    (folder / "ill").touch()
    with monkeypatch.context() as patch:
        patch.setattr(art.finetune.ArtTrainer, "_finish", die)
        with pytest.raises(KeyboardInterrupt):
            await art.finetune.run(file)
    await art.finetune.run(file)
    assert len(policy.asked) == 8 and lines(folder / "out" / "training_metrics.jsonl")[0]["num_failed"] == 2
    file["finetuning"]["max_exceptions"] = 1
    file["trainer_adapters"]["a"]["backend"]["name"] = "again"
    with pytest.raises(FinetuneError, match="ill"):
        await art.finetune.run(file, fresh=True)
    (folder / "ill").unlink()
    await art.finetune.run(file)
    assert lines(folder / "out" / "training_metrics.jsonl")[0]["num_failed"] == 0


async def test_reasons_of_failures_are_the_same_after_a_kill(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        async def bad(question):
            if question in ("question 0", "question 1"):
                raise ValueError(f"boom\\nsecond line of {question}")
            if question == "question 2":
                return "asked nothing"
            return await answer(question)
    """
    file = make_file(code, workflow___type="agent.py:bad", finetuning__max_exceptions=100, finetuning__num_epochs=1)
    kept: list[dict[str, int]] = []
    for is_killed in (False, True):
        file["finetuning"]["output_dir"] = f"out-{is_killed}"
        with monkeypatch.context() as patch:
            if is_killed:
                patch.setattr(art.finetune.ArtTrainer, "_finish", die)
                with pytest.raises(KeyboardInterrupt):
                    await art.finetune.run(file)
        await art.finetune.run(file)
        kept.append(lines(folder / f"out-{is_killed}" / "training_metrics.jsonl")[0]["failures"])
    assert kept[0] == kept[1]
    assert kept[0]["ValueError: boom"] == 4 and sum(kept[0].values()) == 6
    assert not any("RolloutFailed" in reason or "art.finetune" in reason for reason in kept[0])


async def test_a_kill_between_the_servers_history_and_the_folder_repeats_the_same_calls(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server replaces a step's metrics and its file of a split: `tests/long/chaos/test_finetune_kills.py`."""
    curriculum = {"enabled": True, "initial_percentile": 0.5}
    file = make_file(finetuning__curriculum_learning=curriculum, finetuning__num_epochs=1)
    save = Folder.save

    def dies(folder: Folder, **fields: Any) -> None:
        if fields.get("epochs"):
            raise KeyboardInterrupt
        save(folder, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            await art.finetune.run(file)
    await art.finetune.run(file)
    for split in ("epoch", "left_out"):
        first, second = (body for body in policy.logged if body["split"] == split)
        assert first == second and first["step"] == 1


async def test_the_curriculum_chooses_and_the_rest_is_logged(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    curriculum = {"enabled": True, "initial_percentile": 0.5}
    await art.finetune.run(make_file(finetuning__curriculum_learning=curriculum, finetuning__num_epochs=1))
    assert len(policy.trained[0]["groups"]) == 2
    left_out = [body for body in policy.logged if body["split"] == "left_out"]
    assert [len(body["groups"]) for body in left_out] == [2]
    state = json.loads((folder / "out" / "curriculum_state.json").read_text())
    assert state["current_percentile"] == 0.5 and len(state["included_groups"]) == 2


async def test_with_a_seed_requests_have_seeds_that_differ(policy: PolicyServer, make_file: MakeFile) -> None:
    seeds: list[list[str | None]] = []
    for seed in (1, 1, None):
        policy.requests.clear()
        policy.steps.clear()
        await art.finetune.run(make_file(finetuning__seed=seed, eval__general__max_concurrency=1), fresh=True)
        asked = [request for request in policy.requests if request.path.endswith("/chat/completions")]
        seeds.append([request.headers.get("x-art-seed") for request in asked])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == len(seeds[0]) == 16
    assert set(seeds[2]) == {None}


async def test_a_server_that_refuses_the_model_says_why(policy: PolicyServer, make_file: MakeFile) -> None:
    error = {"error": {"message": "art/tiny is not the base model", "code": "other_base"}}
    policy.on("POST", "/api/models", Answer(409, error))
    with pytest.raises(FinetuneError, match="not the base model"):
        await art.finetune.run(make_file())
    policy.on("POST", "/api/models", Answer(403, {"error": {"message": "this key does not cover project 'demo'"}}))
    with pytest.raises(
        FinetuneError, match=r"Name a project of the key: -o trainer_adapters\.a\.backend\.project PROJECT"
    ):
        await art.finetune.run(make_file())
    del policy.routes["POST", "/api/models"]
    await art.finetune.run(make_file(trainer_adapters__a__backend__project="mine"))
    assert policy.steps["mine/agent"] == 2, "the folder has no rollouts, so its run may become another"


BROKEN_CODE = [
    ({"workflow___type": "agent.py:anser"}, "workflow._type: agent.py has no 'anser': did you mean 'answer'?"),
    (
        {"workflow___type": "none.module:answer"},
        "workflow._type: none.module cannot be imported: ModuleNotFoundError: No module named 'none': install it",
    ),
    ({"workflow___type": "agent.py:two"}, "workflow._type: two cannot be called, because of its parameter 'task'"),
    ({"workflow___type": "raising.py:answer"}, "workflow._type: raising.py cannot be imported: KeyError: 'NO_SUCH"),
    ({"eval__evaluators__reward___type": "agent.py:answer"}, "eval.evaluators.reward._type: answer cannot be called"),
    ({"trainers__t___type": "agent.py:Trainer"}, "trainers.t._type: agent.py has no 'Trainer'"),
]


@pytest.mark.parametrize(("changes", "problem"), BROKEN_CODE)
async def test_wrong_code_is_told_with_its_place_before_anything_is_sampled_or_written(
    policy: PolicyServer, folder: Path, make_file: MakeFile, changes: dict[str, Any], problem: str
) -> None:
    (folder / "raising.py").write_text("import os\nos.environ['NO_SUCH_VARIABLE']\n")
    (folder / "f.yml").write_text(json.dumps(make_file("async def two(question, task): ...\n", **changes), indent=1))
    for use in (art.finetune.run, art.finetune.check, art.finetune.evaluate):
        with pytest.raises(WrongInput, match=r"^f\.yml:\d+:\d+: " + re.escape(problem)) as error:
            await use("f.yml")
        assert len(error.value.problems) == 1
    assert {request.method for request in policy.requests} <= {"GET"} and not (folder / "out").exists()


async def test_all_problems_of_the_code_come_at_once(policy: PolicyServer, make_file: MakeFile) -> None:
    overrides = {"workflow._type": "agent.py:a", "trainers.t._type": "agent.py:b"}
    with pytest.raises(WrongInput) as error:
        await art.finetune.run(make_file(), overrides)
    assert [problem.partition(": ")[0] for problem in error.value.problems] == [f"-o {name}" for name in overrides]
    assert not policy.requests


async def test_modules_find_their_model_when_they_are_imported(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    code = """
        import json
        client = AsyncOpenAI()
        with open("at_import.json", "w") as file:
            json.dump([str(client.base_url), client.api_key, os.environ["OPENAI_MODEL"]], file)
        def rows(file_path):
            with open(file_path) as file:
                return json.load(file)
    """
    dataset = {"_type": "custom", "function": "agent.py:rows", "file_path": "rows.json"}
    file = make_file(code, trainer_adapters__a__backend__api_key="sk-own", eval__general__dataset=dataset)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BASE_URL", "API_KEY", "MODEL"):
            patch.setenv(f"OPENAI_{name}", "another")
        await art.finetune.run(file)
    assert json.loads((folder / "at_import.json").read_text()) == [f"{policy.url}/v1/", "sk-own", "demo/agent"]


async def test_a_server_that_cannot_be_started_has_its_own_error(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_file()
    del file["trainer_adapters"]["a"]["backend"]["url"]
    monkeypatch.setattr(art.LocalBackend, "_command", lambda self: [sys.executable, "-c", "exit('no engine here')"])
    with pytest.raises(NoServer, match="no engine here"):
        await art.finetune.run(file)
