"""`art sft`: what is sent for the rows of a file, when the run ends, and what is refused."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from art.finetune.errors import FinetuneError, NoServer, WrongInput
from art.finetune.supervised import Settings, settings_of, train
from plugins.finetune.tests.commands import parsed
from plugins.finetune.tests.policy_server import PolicyServer
from tests.fakes.server import Answer, Request

pytestmark = pytest.mark.anyio


class ExampleServer(PolicyServer):
    """Each job has the next validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = [1.0] * 99

    def train(self, request: Request, model: str) -> Answer:
        self.metrics = {"loss/train": 2.0, "val/loss": self.losses[len(self.trained)]}
        return super().train(request, model)


@pytest.fixture
async def policy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExampleServer]:
    fake = ExampleServer()
    await fake.start()
    monkeypatch.setenv("ART_SERVER_URL", fake.url)
    yield fake
    await fake.stop()


def settings(*flags: str) -> Settings:
    """What the command makes of flags."""
    return settings_of(parsed("sft", "rows.jsonl", "--model", "demo/words", "--base_model", "art/tiny", *flags))


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(autouse=True)
def rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(said(str(number))) + "\n" for number in range(8)))


def asked(body: dict[str, Any]) -> list[str]:
    return [group["trajectories"][0]["messages_and_choices"][0]["content"] for group in body["groups"]]


async def test_each_epoch_is_trained_in_steps_that_are_validated(
    policy: ExampleServer, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.losses, policy.best_step = [0.9, 0.4, 0.5, 0.6], 2
    await train(settings("--validation_share", "0.25", "--num_epochs", "2", "--batch_size", "2", "--eval_steps", "2"))
    assert [len(asked(body)) for body in policy.trained] == [6, 4, 6, 4]
    held_out = asked(policy.trained[0])[-2:]
    for first in (0, 2):
        trained = [text for body in policy.trained[first : first + 2] for text in asked(body)[:-2]]
        assert sorted([*trained, *held_out]) == [str(number) for number in range(8)]
    assert all(asked(body)[-2:] == held_out and body["config"]["held_out"] == 2 for body in policy.trained)
    rates = [rate for body in policy.trained for rate in body["config"]["learning_rate"]]
    assert len(rates) == 6 and rates[0] == max(rates) == 1e-4 and rates[-1] == pytest.approx(1e-5)
    lines = capfd.readouterr().err.splitlines()
    assert "epoch 1/2, optimizer step 3/6: loss 2.0000, validation loss 0.4000, step 2" in lines
    assert lines[-1] == "the best step is 2 (validation loss 0.4000), kept as demo/words@2 and demo/words@best"


async def test_the_same_command_trains_no_step_twice(policy: ExampleServer) -> None:
    await train(settings("--num_epochs", "2"))
    await train(settings("--num_epochs", "2"))
    assert len(policy.trained) == 2
    await train(settings("--num_epochs", "2", "--batch_size", "4"))
    assert len(policy.trained) == 4, "other settings are another run"


async def test_a_run_ends_after_validations_without_a_better_one(
    policy: ExampleServer, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "held_out.csv").write_text("question;answer\nwhy?;because\n")
    policy.losses = [1.0, 0.5, 0.6, 0.5, 0.4]
    await train(settings("--validation_dataset", "held_out.csv", "--num_epochs", "9", "--patience", "2"))
    assert len(policy.trained) == 4
    assert policy.trained[0]["groups"][-1]["trajectories"][0]["messages_and_choices"] == [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because"},
    ]
    assert "the last 2 validations were not better than an earlier one: the run ends" in capfd.readouterr().err


WRONG: dict[str, tuple[list[str], str]] = {
    "--model words: write PROJECT/NAME": (["--model", "words"], ""),
    "--patience needs validations": (["--patience", "2"], ""),
    "leave one of the two out": (["--validation_share", "0.5", "--validation_dataset", "rows.jsonl"], ""),
    "--validation_share: must be between 0 and 1": (["--validation_share", "3"], ""),
    "--validation_share: a share of 0.5 leaves none of 1 rows": (["--validation_share", "0.5"], json.dumps(said("a"))),
    "--batch_size: must be at least 1, not 0": (["--batch_size", "0"], ""),
    "--learning_rate: must be above 0": (["--learning_rate", "-1"], ""),
    "no such file": (["--validation_dataset", "none.jsonl"], ""),
    "rows.jsonl: line 1: neither `messages` nor 'answer' (--answer_key); the columns are question": (
        [],
        '{"question": "a"}',
    ),
    "line 1: its `conversations` are of the form ShareGPT": ([], '{"conversations": []}'),
    "line 1: `messages` is the text 'a'": ([], '{"messages": "a"}'),
    "name a file that ends with": (["--validation_dataset", "agent.py"], ""),
}


@pytest.mark.parametrize("problem", WRONG)
async def test_what_is_wrong_is_named_before_a_server_is_asked(
    policy: ExampleServer, folder: Path, problem: str
) -> None:
    flags, row = WRONG[problem]
    if row:
        (folder / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(WrongInput) as refused:
        await train(settings(*flags))
    assert problem in str(refused.value) and not policy.requests


async def test_a_failed_job_and_a_lost_server_have_their_own_errors(policy: ExampleServer) -> None:
    policy.job_error = {"message": "CUDA out of memory", "code": "out_of_memory"}
    with pytest.raises(FinetuneError, match=r"out of memory.*--batch_size, begins the examples anew") as failed:
        await train(settings())
    assert failed.value.exit_code == 1
    await policy.stop()
    with pytest.raises(NoServer, match="art-server"):
        await train(settings())
