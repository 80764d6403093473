"""`--sweep`: the values of a sweep, and runs side by side as processes."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from art import Evaluation
from art.estimates import estimate_rewards
from art.finetune import WrongInput
from art.finetune.run_record import EpochRow, State, reward_figures, validation_row
from art.finetune.runs import prepare
from art.finetune.sweeping import _trained, variants_of, write_results  # pyright: ignore[reportPrivateUsage]
from art_finetune.commands import _without_sweeps  # pyright: ignore[reportPrivateUsage]
from plugins.finetune.tests.commands import end, start
from plugins.finetune.tests.policy_server import PolicyServer
from tests.fakes.server import Answer
from tests.processes import wait_until_gone
from tests.waiting import until

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]
RATE = "trainer_adapters.a.training.learning_rate"
NAME = "trainer_adapters.a.backend.name"


def labels(file: dict[str, Any], *sweeps: str) -> list[str]:
    return [variant.label for variant in variants_of(prepare(file), sweeps)]


async def test_a_run_for_each_value_and_for_each_combination(make_file: MakeFile) -> None:
    file = make_file(llms={"policy": {"_type": "openai", "model_name": "agent"}})
    first, second = variants_of(prepare(file), ["learning_rate=1e-5, 1e-4"])
    assert first.label == "learning_rate=1e-5" and second.folder == Path("out/learning_rate-1e-4")
    config = prepare(file, first.overrides).config
    assert (config.adapter.training.learning_rate, config.adapter.backend.name) == (1e-5, "agent-learning_rate-1e-5")
    assert (config.finetuning.output_dir, config.finetuning.target_model) == (first.folder, "policy")
    assert labels(file, "rank=4,8", "seed=1,2") == [
        *("rank=4,seed=1", "rank=4,seed=2", "rank=8,seed=1", "rank=8,seed=2")
    ]
    fields = [
        variant.overrides[0] for variant in variants_of(prepare(file), ["target_modules=[q_proj,v_proj],[q_proj]"])
    ]
    assert fields == [
        ("trainer_adapters.a.backend.lora.target_modules", "[q_proj,v_proj]"),
        ("trainer_adapters.a.backend.lora.target_modules", "[q_proj]"),
    ]
    assert labels(file, "num_generations=2,4", "finetuning.curriculum_learning.enabled=true,false")[0] == (
        "num_generations=2,finetuning.curriculum_learning.enabled=true"
    )


WRONG = {
    "learning_rate": "write NAME=VALUE,VALUE",
    "learning_rate=1e-5,": "write NAME=VALUE,VALUE",
    "learning_rate=1e-5,1e-5": "with different values",
    "learning_rate=1e-5": "give at least two values",
    "learning_rat=1,2": "no such field",
    "preset=a/b,a b": "the same folder",
}


@pytest.mark.parametrize("text", WRONG)
async def test_a_wrong_sweep_is_one_sentence(make_file: MakeFile, text: str) -> None:
    with pytest.raises(WrongInput) as wrong:
        labels(make_file(), text)
    (sentence,) = wrong.value.problems
    assert sentence.startswith("--sweep ") and WRONG[text] in sentence


def test_the_runs_get_the_command_without_its_sweeps() -> None:
    typed = ["finetune", "f.yml", "--sweep", "a=1,2", "--fresh", "--sweep=b=1,2", "--swe", "c=1,2", "--schema"]
    assert _without_sweeps(typed) == ["finetune", "f.yml", "--fresh", "--schema"]


def alternate(policy: PolicyServer) -> None:
    """Each question is answered with yes and no in turns, for each model by itself."""
    counts: Counter[tuple[str, str]] = Counter()

    def answer(question: str, _: int) -> str:
        case = policy.asked[-1]["model"], question
        counts[case] += 1
        return ("yes", "no")[counts[case] % 2]

    policy.answer = answer


async def test_runs_side_by_side_leave_one_table_and_one_plot(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    alternate(policy)
    policy.steps.clear()
    code, text = await end(await start(folder, make_file(), "--sweep", "learning_rate=1e-5,1e-4"))
    assert code == 0, text
    assert policy.steps == {"demo/agent-learning_rate-1e-5": 2, "demo/agent-learning_rate-1e-4": 2}
    assert Counter(body["config"]["learning_rate"] for body in policy.trained) == {1e-5: 2, 1e-4: 2}
    assert "learning_rate=1e-4: epoch 2/2: reward 0.5000" in text and "%|" not in text
    assert "the best run is learning_rate=1e-" in text
    table = (folder / "out" / "sweep.md").read_text().splitlines()
    assert table[2:] == [f"| learning_rate={rate} | 2 epochs | 0.5000 | 0.5000 |  |  |  |" for rate in ("1e-5", "1e-4")]
    assert (folder / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "epoch 2/2" in (folder / "out" / "learning_rate-1e-4.log").read_text()
    more = ["--sweep", "learning_rate=1e-5,1e-4", "--num_epochs", "3"]
    assert (await end(await start(folder, make_file(), *more)))[0] == 0
    assert set(policy.steps.values()) == {3}, "the same command continues"


@pytest.mark.parametrize(
    ("num_trained", "batch", "words"),
    [
        ([4, 4], None, "2 epochs"),
        ([4], 0, "1 step"),
        ([0, 4, 0], 2, "1 step, 2 without signal"),
        ([0, 0], 1, "no signal"),
    ],
)
def test_only_steps_that_were_trained_count(num_trained: list[int], batch: int | None, words: str) -> None:
    none = dict.fromkeys(name for name in EpochRow.model_fields if name.endswith("_reward"))
    numbers: dict[str, Any] = {
        "epoch": 0,
        "num_trajectories": 4,
        "num_groups": 2,
        "filtered_trajectories": 0,
        "curriculum_percentile": 1,
        "step": 0,
    }
    rows = [EpochRow(**none, **numbers, run_id="run", batch=batch, filtered_groups=number) for number in num_trained]
    assert _trained(rows) == words


def run_of(start: float, *later: float, num_rows: int = 12) -> State:
    """The record of a run with a validation before the first step, and one after each step."""
    errors = [estimate_rewards([float(n < mean * num_rows) for n in range(num_rows)]) for mean in (start, *later)]
    validations = [
        validation_row({"epoch": number}, Evaluation("a", number, estimate, (estimate.mean,), 1, 0, {}, []))
        for number, estimate in enumerate(errors)
    ]
    return State(config={}, epochs=[an_epoch(number) for number in range(len(later))], validations=validations)


def an_epoch(number: int) -> EpochRow:
    rewards = reward_figures([0.0, 1.0]) | reward_figures([0.0, 1.0], "filtered_")
    counts = dict.fromkeys(("num_trajectories", "num_groups", "filtered_trajectories", "filtered_groups"), 2)
    return EpochRow(epoch=number, run_id="run", **rewards, **counts, curriculum_percentile=1.0, step=number + 1)


COLLAPSED = (0.5, 0.25, 0.0)
VERDICTS = [
    ({"high": run_of(*COLLAPSED), "low": run_of(0.5, 0.25, 0.25)}, "no run is better than the base: 0.5 (95% "),
    ({"high": run_of(*COLLAPSED), "low": run_of(0.5, 0.5, 0.75)}, "not decided: the intervals overlap of low, "),
    (
        {"high": run_of(*COLLAPSED, num_rows=96), "low": run_of(0.5, 0.75, num_rows=96)},
        "the best run is low; table and plot",
    ),
]


@pytest.mark.parametrize(("states", "words"), VERDICTS)
def test_the_untrained_model_is_no_run_s_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], states: dict[str, State], words: str
) -> None:
    write_results(tmp_path, states, dict.fromkeys(states, 0))
    printed = capsys.readouterr()
    assert printed.err.startswith(words)
    base, *runs = printed.out.splitlines()[2:]
    assert base.startswith("| base | | | | 0.5 (95% ") and base.endswith("| 0 | |") and len(runs) == 2
    assert "| 0.25 (95% " in runs[0] and f", n={states['high'].validations[0].num_examples}) | 1 |" in runs[0]


async def test_a_run_that_is_not_trained_is_named_and_the_others_are_trained(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    alternate(policy)
    train = policy.train

    def strict(request: Any, model: str) -> Answer:
        refusal = Answer(422, {"error": {"message": "no", "code": "refused"}})
        return refusal if "seed-2" in model else train(request, model)

    policy.train = strict  # type: ignore[method-assign]
    code, text = await end(await start(folder, make_file(), "--sweep", "seed=1,2", "-o", "finetuning.num_epochs", "1"))
    assert code == 1
    last = text.splitlines()[-1]
    assert "1 of 2 runs were not trained" in last and "out/seed-2.log" in last
    assert "epoch 1 was not trained" in (folder / "out" / "seed-2.log").read_text()
    table = (folder / "out" / "sweep.md").read_text()
    assert "| seed=1 | 1 epoch | 0.5000 |" in table and "| seed=2 |  |  |  |  |  | exit code 1 |" in table


async def test_a_wrong_value_is_told_before_a_run_begins(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    for sweep, problem in (("learning_rate=1e-5,7", f"-o {RATE}: must be"), ("rank=2,0", "backend.lora.rank: must be")):
        code, text = await end(await start(folder, make_file(), "--sweep", sweep))
        assert code == 2 and problem in text and "Traceback" not in text
    code, text = await end(await start(folder, make_file(), "--sweep", "seed=1,2", "--check"))
    assert code == 2 and "--check checks one run" in text
    assert not policy.requests and not (folder / "out").exists()


HANGS = """
    import asyncio
    async def hang(question):
        open("hangs", "a").write(".")
        await asyncio.Event().wait()
"""


async def test_a_stopped_sweep_leaves_no_run_behind(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    file = make_file(HANGS, workflow___type="agent.py:hang")
    process = await start(folder, file, "--sweep", "seed=1,2")
    hangs = folder / "hangs"
    await until(lambda: process.returncode is not None or (hangs.exists() and hangs.stat().st_size >= 9))
    runs = {child.pid for child in psutil.Process(process.pid).children()}
    process.send_signal(signal.SIGTERM)
    code, text = await end(process)
    assert code == 143 and text.splitlines()[-1].endswith("art finetune file.yml --sweep seed=1,2"), text
    assert len(runs) == 2
    wait_until_gone(runs)
    logs = [json.dumps((folder / "out" / f"seed-{seed}.log").read_text()) for seed in (1, 2)]
    assert all("this continues: art finetune file.yml -o finetuning.seed" in log for log in logs)
