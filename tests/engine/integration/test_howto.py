"""The how-to pages that need an engine: their Python and their commands run as they stand, on art/tiny."""

import asyncio
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import art
from art_server.store.base_models import TINY_DIR
from tests.live import Server
from tests.makers.demo import rows_by_step
from tests.pages import HOWTO, SERVERS, blocks, run
from tests.waiting import until

pytestmark = pytest.mark.anyio

QUESTION = "respond with yes, no, maybe"


REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


NUM_STEPS = 3


def score(answer: str | None) -> float:
    return float((answer or "").strip() == "maybe")


async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": question}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, logprobs=True
    )
    choice = completion.choices[0]
    reward = score(choice.message.content)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def graded(model: art.TrainableModel, question: str) -> art.Trajectory:
    """Rewards of which a group of eight has almost always two, so that it is trained."""
    trajectory = await rollout(model, question)
    (said,) = trajectory.messages()[1:]
    trajectory.reward = REWARDS.get(str(said.get("content")), 0.0)
    return trajectory


async def sample(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        (art.TrajectoryGroup(graded(model, QUESTION) for _ in range(8)) for _ in range(32)), min_informative=4
    )


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[art.Backend]:
    async with art.Backend(server.url) as backend:
        yield backend


@pytest.fixture
async def model(backend: art.Backend) -> art.TrainableModel:
    """The pages' demo/agent, at step 3 or later."""
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(backend)
    for _ in range(await model.get_step(), NUM_STEPS):
        await model.train(await sample(model), art.TrainConfig(learning_rate=1e-3))
    return model


@pytest.fixture(autouse=True)
def home(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose `.art` is the server's folder, with the commands of this environment in PATH."""
    (tmp_path / ".art").symlink_to(server.path / "art")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("ART_SERVER_URL", server.url)
    return tmp_path


async def shell(line: str) -> str:
    """What a command prints. It ends with status 0."""
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, (line, errors.decode())
    return output.decode()


def lines(page: str, program: str) -> list[str]:
    """The lines of bash that call a program."""
    bash_lines = "".join(blocks(page, "bash")).splitlines()
    return [line for line in bash_lines if line.startswith(f"{program} ")]


async def test_the_gap_is_that_of_float32(model: art.TrainableModel, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"art": art, "model": model, "groups": await sample(model)}
    await run("gap.md", 0, names)
    printed = dict(re.findall(r"(loss/\w+) (\S+)", capsys.readouterr().out))
    assert float(printed["loss/logprob_gap_mean"]) < 1e-5
    assert 0.9 < float(printed["loss/importance_ratio_p99"]) < 1.1
    assert float(printed["loss/corrected_token_fraction"]) == 0.0


async def test_rollouts_and_tokens_are_read(model: art.TrainableModel, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    await run("read-rollouts.md", 0, names)
    told = capsys.readouterr().out.splitlines()
    asked = [line for line in told if line.split() == ["user", *QUESTION.split()]]
    answers = [line for line in told if line.startswith("    assistant ")]
    assert len(asked) == len(answers) >= 32
    assert {turn["step"] for turn in names["trajectory"]["turns"]} == {2}
    await run("read-rollouts.md", 1, names)
    word, gap = capsys.readouterr().out.rsplit(" ", 1)
    assert word.startswith("'") and 0 < float(gap) < 4e-4


async def test_rollouts_are_shown(model: art.TrainableModel) -> None:
    await art.evaluate(model, rollout, [QUESTION], step=3, seed=1)
    newest, group, searched, low = lines("read-rollouts.md", "art")
    assert f"demo/agent, step {await model.get_step()}, train" in await shell(newest)
    assert QUESTION in await shell(group)
    assert "demo/agent, step 3, val" in await shell(searched)
    assert "demo/agent, step 3, train" in await shell(low)


def history(name: str) -> list[dict[str, Any]]:
    return list(rows_by_step(Path(f".art/demo/models/{name}/history.jsonl")).values())


async def test_an_environment_trains(backend: art.Backend, capsys: pytest.CaptureFixture[str]) -> None:
    model = art.TrainableModel(name="player", project="demo", base_model="art/tiny")
    await model.register(backend)
    names: dict[str, Any] = {"art": art, "model": model, "STEPS": 14}
    await run("environments.md", 0, names)
    await run("environments.md", 1, names)
    rewards = [row["train/reward"] for row in history("player")]
    assert len(rewards) == 14 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.9, rewards
    await run("environments.md", 2, names)
    assert len(names["groups"]) == 4 and len(names["groups"][0].trajectories) == 4
    assert "demo/player@14: reward" in capsys.readouterr().out


async def test_a_student_learns_from_its_teacher_s_probabilities(backend: art.Backend) -> None:
    """The teacher has learnt one answer by heart, which the student gives one time in ten."""
    teacher = art.TrainableModel(name="teacher", project="demo", base_model="art/tiny")
    await teacher.register(backend)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    messages.append({"role": "assistant", "content": "maybe"})
    known = [art.Trajectory(messages_and_choices=messages)] * 2
    await teacher.train_sft(known, art.TrainSFTConfig(learning_rate=2e-3, batch_size=2, epochs=16))
    taught = await art.evaluate(teacher, rollout, [QUESTION], reps=64, seed=1, log=False)
    names: dict[str, Any] = {"art": art, "backend": backend, "rollout": rollout}
    names |= {"teacher": teacher, "questions": [QUESTION] * 4, "STEPS": 12}
    await run("distillation.md", 0, names)
    learnt = await art.evaluate(names["student"], rollout, [QUESTION], reps=64, seed=1, log=False)
    assert taught.reward.mean > 0.7 and learnt.reward.mean > 0.3, (learnt, taught)
    gaps = [row["train/teacher_gap"] for row in history("student") if "train/teacher_gap" in row]
    assert len(gaps) == 12 and gaps[0] < -0.3 and gaps[-1] > 0.5 * gaps[0], gaps
    base = art.Model(
        name="base",
        project="demo",
        inference_model_name="art/tiny",
        inference_base_url=f"{backend.base_url}/v1",
        inference_api_key="key",
    )
    fresh = art.TrainableModel(name="fresh", project="demo", base_model="art/tiny")
    await fresh.register(backend)
    group = await art.TrajectoryGroup(rollout(fresh, QUESTION) for _ in range(4))
    (taught,) = await art.distill([group], base)
    for trajectory in taught.trajectories:  # step 0 is the base model: nothing to learn
        assert trajectory.metrics["teacher_gap"] == pytest.approx(0.0, abs=1e-4)
    await base.close()


async def test_a_model_learns_from_text_about_its_errors(model: art.TrainableModel) -> None:
    """Advantages against Hugging Face's own forward pass of the base model."""
    fresh = art.TrainableModel(name="hinted", project="demo", base_model="art/tiny")
    await fresh.register(model.backend())
    names: dict[str, Any] = {"art": art, "model": fresh, "questions": [QUESTION], "STEPS": 1}
    names["check"] = lambda text: None if text == "perhaps" else "Say perhaps"
    await run("distillation.md", 1, names)
    (row,) = [row for row in history("hinted") if "train/teacher_gap" in row]
    assert row["train/teacher_gap"] < 0  # on average minus a KL divergence; the answers are sampled
    (group,) = names["groups"]
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIR)
    tiny = AutoModelForCausalLM.from_pretrained(TINY_DIR, dtype=torch.float32)
    for trajectory in group.trajectories[:3]:
        choice: Any = trajectory.messages_and_choices[-1]
        read = names["hint"](trajectory.messages()[:1], trajectory, group)
        if read is None:
            continue
        gaps = [
            scores(
                tiny,
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
                choice.token_ids,
            )
            for messages in (read, trajectory.messages()[:1])
        ]
        expected = [max(-5.0, min(5.0, taught - own)) for taught, own in zip(*gaps, strict=True)]
        assert trajectory.turn_advantages == [pytest.approx(expected, abs=1e-3)]
    same = await art.TrajectoryGroup(rollout(fresh, QUESTION) for _ in range(2))
    taught = await art.distill([same], fresh, teacher_messages=lambda messages, *_: messages)
    assert all(set(advantages) == {0.0} for advantages in map(only_advantages, taught[0]))
    assert (await fresh.train(taught)).metrics["data/step_num_groups_trainable"] == 0
    with pytest.raises(art.ArtError, match="shorten the feedback"):
        await art.distill(
            [same], fresh, teacher_messages=lambda messages, *_: art.with_feedback(messages, feedback="a " * 9999)
        )


async def test_the_likeliest_tokens_of_a_teacher_are_learned(model: art.TrainableModel) -> None:
    """The divergence that the trainer reports is that of Hugging Face's own forward passes, and falls on the same targets."""
    fresh = art.TrainableModel(name="taught", project="demo", base_model="art/tiny")
    await fresh.register(model.backend())
    sampled = [await art.TrajectoryGroup(rollout(fresh, QUESTION) for _ in range(4))]
    names: dict[str, Any] = {"art": art, "model": fresh, "groups": sampled}
    names["hint"] = lambda messages, *_: art.with_feedback(messages, feedback="Say maybe")
    await run("distillation.md", 2, names)
    (row,) = [row for row in history("taught") if "loss/teacher_divergence" in row]
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIR)
    tiny = AutoModelForCausalLM.from_pretrained(TINY_DIR, dtype=torch.float32)
    divergences: list[float] = []
    for trajectory in sampled[0]:
        choice: Any = trajectory.messages_and_choices[-1]
        messages = trajectory.messages()[:1]
        taught, own = (
            distributions(
                tiny, tokenizer.apply_chat_template(read, add_generation_prompt=True, return_dict=False), choice
            )
            for read in (names["hint"](messages), messages)
        )
        for teacher_V, student_V, token in zip(taught, own, choice.token_ids, strict=True):
            ids = teacher_V.topk(20).indices.tolist()
            ids = ids if token in ids else [*ids[:-1], token]
            pairs = [(float(teacher_V[index]), float(student_V[index])) for index in ids]
            pairs.append((1 - sum(teacher for teacher, _ in pairs), 1 - sum(student for _, student in pairs)))
            divergences.append(sum(teacher * math.log(teacher / student) for teacher, student in pairs))
    assert row["loss/teacher_divergence"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-2)
    again = await fresh.train(names["groups"], art.TrainConfig(distill_alpha=0.0))
    assert again.metrics["loss/teacher_divergence"] < row["loss/teacher_divergence"]
    with pytest.raises(art.ArtError, match="max_logprobs"):
        await art.distill(sampled, fresh, teacher_messages=names["hint"], top_k=21)
    await names["first"].close()


def distributions(model: Any, prompt: list[int], choice: Any) -> torch.Tensor:
    """The probabilities of all tokens at each token of an answer, in float64."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *choice.token_ids]])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.double().softmax(-1)


def only_advantages(trajectory: art.Trajectory) -> list[float]:
    (advantages,) = trajectory.turn_advantages or []
    assert isinstance(advantages, list)
    return advantages


def scores(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probabilities of an answer's tokens."""
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0], -1)
    return [float(logprobs_TV[len(prompt) + index - 1, token]) for index, token in enumerate(tokens)]


def write_examples(trajectories: list[art.Trajectory]) -> None:
    rows = [{"messages": trajectory.messages()} for trajectory in trajectories]
    Path("examples.jsonl").write_text("\n".join(map(json.dumps, rows)))


async def test_a_warm_start_raises_the_probability_of_its_examples(
    server: Server, backend: art.Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    model = art.TrainableModel(name="warm", project="demo", base_model="art/tiny")
    await model.register(backend)
    before = await art.evaluate(model, rollout, [QUESTION], reps=32, seed=1, log=False)
    names: dict[str, Any] = {"art": art, "asyncio": asyncio, "model": model, "score": score}
    names |= {"TEACHER_URL": f"{server.url}/v1", "TEACHER_NAME": "demo/warm", "sample": sample}
    await run("sft.md", 0, names)
    first: art.TrainResult = names["result"]
    assert first.report.turns == {"recomputed": 2} and first.step == 1
    assert first.metrics["data/step_num_gradient_steps"] == 16
    loss, accuracy = map(float, capsys.readouterr().out.split()[1:])
    assert 0 < loss < 2 and 0 < accuracy < 1
    after = await art.evaluate(model, rollout, [QUESTION], reps=32, seed=1, log=False)
    assert before.reward.mean < 0.4 and after.reward.mean > 0.9, (before, after)

    write_examples(names["trajectories"])
    await run("sft.md", 1, names)
    assert names["result"].step == 5, "one for the file, one for each epoch of the dataset"
    await run("sft.md", 3, names)
    assert names["traces"] and names["result"].report.turns == {"recomputed": len(names["traces"])}
    fresh = art.TrainableModel(name="best", project="demo", base_model="art/tiny")
    await fresh.register(backend)
    names |= {"model": fresh}
    await run("sft.md", 4, names)
    assert names["result"].step == 1
    assert names["result"].report.turns.keys() == {"ledger"}, "the sampled tokens themselves"


def write_program(page: str, number: int) -> None:
    Path("program.py").write_text(blocks(page, "python")[number])


async def test_a_killed_sft_program_trains_each_chunk_once(
    server: Server, backend: art.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_SERVER_URL", server.url)
    write_program("sft.md", 2)
    command = (sys.executable, "program.py")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    first = (await process.stdout.readline()).decode()
    with server.client(params={"state": "queued,running,done"}) as client:
        await until(lambda: [job["name"] for job in client.get("/api/jobs").json()["jobs"]].count("resumed-sft") > 1)
    process.kill()  # the server has accepted the second chunk
    await process.communicate()
    outputs = [await shell(" ".join(command)) for _ in range(2)]
    lines = outputs[0].splitlines()
    assert outputs[0] == outputs[1] and lines[0] == first.strip()
    assert [line.partition(", loss")[0] for line in lines] == [
        f"chunk at {step}: step {number}" for number, step in enumerate((0, 4, 8, 12), 1)
    ]
    model = art.TrainableModel(name="resumed-sft", project="howto", base_model="art/tiny")
    await model.register(backend)
    assert await model.get_step() == 4


def keep(groups: list[art.TrajectoryGroup]) -> None:
    """As if the program had ended between the train call and the deletion of the file."""
    Path("groups.json").write_text(json.dumps([group.model_dump(mode="json") for group in groups]))


async def test_the_same_program_gives_the_same_rewards_again(
    backend: art.Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    await run("resume.md", 0, names)
    await names["main"]()
    first = capsys.readouterr().out
    assert len(first.splitlines()) == names["NUM_STEPS"]
    await names["main"]()
    assert capsys.readouterr().out == "", "all steps exist"
    model = art.TrainableModel(name="resumed", project="howto", base_model="art/tiny")
    await model.register(backend)
    await model.delete()
    await names["main"]()
    assert capsys.readouterr().out == first

    await model.register(backend)
    names["model"] = model
    await run("resume.md", 1, names)
    assert names["result"].step == names["NUM_STEPS"] + 1
    keep(names["groups"])  # as read again from the file, and so with another digest than the sampled ones
    await run("resume.md", 1, names)
    first_result: art.TrainResult = names["result"]
    keep(names["groups"])
    await run("resume.md", 1, names)
    assert names["result"].step == first_result.step


async def test_the_queue_is_shown_and_its_routes_answer(server: Server, model: art.TrainableModel) -> None:
    running, ended, _ = lines("share-a-server.md", "art")
    await shell(running)
    assert "demo/agent" in await shell(ended)
    with server.client() as client:
        (job, *_) = client.get("/api/jobs", params={"state": "done"}).json()["jobs"]
    listed, cancelled, moved = [
        re.sub(rf"{SERVERS[1]}|\bJOB\b", lambda m: job["job_id"] if m[0] == "JOB" else server.url, line)
        for line in lines("share-a-server.md", "curl")
    ]
    assert json.loads(await shell(listed)) == {"jobs": []}
    assert json.loads(await shell(cancelled))["error"]["code"] == "job_ended"
    answer = json.loads(await shell(moved.replace('"OTHER"', "null")))
    assert answer["error"]["code"] == "not_queued"


SCRIPT = """
import torch
BASE = {base!r}
{blocks}
print(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""


async def test_an_exported_model_answers_as_on_the_server(model: art.TrainableModel, home: Path) -> None:
    adapter, merged, pushed = lines("serve-elsewhere.md", "art")
    assert "--push" in pushed  # needs an account
    await asyncio.gather(*(shell(line.replace("@12", "@3")) for line in (adapter, merged)))
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(3), messages=[{"role": "user", "content": QUESTION}], max_tokens=8, temperature=0
    )
    code = "\n".join(blocks("serve-elsewhere.md", "python"))
    (home / "program.py").write_text(SCRIPT.format(base=str(TINY_DIR), blocks=code))
    answers = (await shell(f"{sys.executable} program.py")).splitlines()
    assert answers == [completion.choices[0].message.content] * 2


async def test_programs_of_others_train(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for number in range(3):
        await run("from-others.md", number, names)
    config = art.TrainConfig(learning_rate=2e-3)
    await names["train"]("from-trl", names["rows"], names["rollout"], config, num_epochs=4)
    await names["train"](
        "from-verl", names["parquet"], names["scored"], names["config"], num_epochs=2, num_generations=5
    )
    await names["as_in_art"](num_steps=2)
    for name, num_steps in (("from-trl", 8), ("from-verl", 4), ("from-art", 2)):
        rows = rows_by_step(Path(f".art/howto/models/{name}/history.jsonl"))
        rewards = [row["train/reward"] for row in rows.values()]
        assert len(rewards) == num_steps, (name, rewards)
        if name == "from-trl":
            assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    assert capsys.readouterr().out.count("\n") == 8 + 4


async def test_a_file_of_the_toolkit_trains(server: Server, home: Path) -> None:
    code = re.findall(r"```python\n(# agent.py.*?)```", (HOWTO.parent / "finetune.md").read_text(), re.DOTALL)
    (home / "agent.py").write_text(code[0])
    rows = [{"question": question, "answer": "maybe"} for question in (QUESTION, "answer with no, maybe, yes")]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (text,) = blocks("from-others.md", "yaml")
    (home / "from-nat.yml").write_text(text.replace("port: 7623", f"port: {server.url.rpartition(':')[2]}"))
    (line,) = lines("from-others.md", "art")
    await shell(line)
    assert len((home / ".tmp/from-nat/training_metrics.jsonl").read_text().splitlines()) == 4


async def test_retries_of_an_agent_are_left_out_or_are_turns(backend: art.Backend) -> None:
    model = art.TrainableModel(name="retries", project="demo", base_model="art/tiny")
    await model.register(backend)
    names: dict[str, Any] = {"art": art, "score": score}
    names["parse"] = lambda said: said if str(said).strip() == "maybe" else None
    await run("agent-retries.md", 1, names)
    await run("agent-retries.md", 2, names)
    played = await art.gather_trajectories(names["rollout"](model, QUESTION) for _ in range(16))
    for trajectory in played:
        assert trajectory.metrics.get("unused_choices", 0) == trajectory.metrics["tries"] - 1
        assert len(trajectory.messages()) == 2
    assert max(trajectory.metrics["tries"] for trajectory in played) > 1
    talked = await art.gather_trajectories(names["corrected"](model, QUESTION) for _ in range(16))
    longest = max(talked, key=lambda trajectory: len(trajectory.messages()))
    assert longest.turn_rewards is not None and len(longest.turn_rewards) > 1
    longest.reward += 1.0  # by chance all are equal
    result = await model.train([art.TrajectoryGroup(talked)])
    assert result.report.num_groups_trained == 1


async def test_a_run_is_rolled_back_to_its_best_step(backend: art.Backend) -> None:
    model = art.TrainableModel(name="fell", project="demo", base_model="art/tiny")
    await model.register(backend)
    for _ in range(2):
        await model.train(await sample(model), art.TrainConfig(learning_rate=1e-3))
    await model.log(metrics={"reward": 1.0}, split="val", step=1)
    await run("not-learning.md", 0, {"model": model})
    assert await model.get_step() == 1


async def test_the_cost_of_a_run_is_computed(model: art.TrainableModel, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(await model.get_step(), 6):
        await model.train(await sample(model), art.TrainConfig(learning_rate=1e-3))
    await run("sizing.md", 0, {})
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a step: [\d.]+ s, of which [\d.]+ s train, save and load; [\d,]+ tokens", first)
    assert second.startswith("200 steps: ") and second.endswith(" dollars")
