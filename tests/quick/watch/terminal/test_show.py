"""What `art show` prints: groups as tables, rollouts in panels, and nothing that a terminal obeys."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
from art_protocol.history import pack_rows, trajectory_row
from art_protocol.wire import LoRAConfig, TrajectoryBody, TrajectoryGroupBody
from art_server.store.model_folder import ModelFolder, ModelRecord
from art_watch.terminal.show import print_show
from tests.fakes.vllm import TEXT
from tests.makers.demo import log
from tests.quick.server.served import serving
from tests.quick.watch.terminal.conftest import ESCAPES, SHOWN_ESCAPES, Ran, screen, shown

Run = Callable[..., Ran]

ENTRY: dict[str, Any] = {
    "role": "assistant",
    "text": "Vienna.",
    "reasoning": "",
    "tool_calls": [],
    "name": None,
    "tool_call_id": None,
    "finish_reason": "stop",
    "turn": None,
}
TURN = {"origin": "ledger", "continues": "joined", "step": 4, "sequence": 0, "start": 2, "stop": 4}


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    group = {"index": 0, "mean": 0.5, "std": 0.5, "is_dead": False, "rollouts": []}
    details = {"metrics": {}, "metadata": {}, "logs": []}
    rollout = {
        "group": 0,
        "index": 1,
        "reward": 1.0,
        "histories": [{"entries": list(entries), "tools": None}],
        "sequences": [],
        "has_token_record": False,
        "scores": [],
    }
    return {
        "model": "p/a",
        "split": "train",
        "step": 5,
        "groups": [group | details | {"failures": []}],
        "rollouts": [rollout | details],
    }


def test_a_rollout_has_a_panel_for_each_message() -> None:
    call = {"name": "search", "arguments": '{"q": 1}'}
    asked = ENTRY | {"role": "user", "text": "Where is it? " * 10, "finish_reason": None}
    thought = ENTRY | {"reasoning": "I look.", "text": "", "tool_calls": [call], "turn": TURN}
    dropped = ENTRY | {"turn": {"dropped": "its record has expired"}}
    console = screen(60)
    print_show(console, document(asked, thought, dropped))
    assert (
        shown(console)
        == """\
p/a, step 5, train

group 0, mean 0.500, deviation 0.500

rollout 1 of group 0, reward 1.000
╭─ user ───────────────────────────────────────────────────╮
│ Where is it? Where is it? Where is it? Where is it?      │
│ Where is it? Where is it? Where is it? Where is it?      │
│ Where is it? Where is it?                                │
╰──────────────────────────────────────────────────────────╯
╭─ assistant ──────────────────────────────────────────────╮
│ I look.                                                  │
│ → search({"q": 1})                                       │
╰─ stop, tokens from ledger, 2 tokens, sampled by step 4, ─╯
╭─ assistant ──────────────────────────────────────────────╮
│ Vienna.                                                  │
╰─ stop, not trained: its record has expired ──────────────╯"""
    )


def test_an_answer_has_what_its_request_demanded() -> None:
    form = {"type": "json_schema", "name": "city", "strict": True}
    console = screen(120)
    print_show(console, document(ENTRY | {"sampled_by": {"step": 4, "tool_choice": "required", "format": form}}))
    assert 'stop, tool_choice required, format {"type": "json_schema", "name": "city", "strict": true}' in shown(
        console
    )


def test_a_turn_that_begins_a_new_sequence_says_why() -> None:
    difference = "the policy's answer: expected 'a', found 'a</code>'"
    console = screen(80)
    print_show(console, document(ENTRY | {"turn": TURN | {"continues": "changed", "difference": difference}}))
    assert difference in shown(console)


def test_the_table_of_a_step_fits_eighty_columns(folder: Path, run: Run) -> None:
    step = json.loads(run("show", "webnav-8b@1", "--limit", "2", "--json", "--path", folder).out)
    console = screen(80)
    print_show(console, step)
    lines = shown(console).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "demo/webnav-8b, step 1, train"
    assert "no signal" in next(line for line in lines if line.startswith("group 1"))
    assert any(line.startswith("failed: TimeoutError: the tool did not answer <img") for line in lines)
    dropped = next(line for line in lines if "1 dropped" in line)
    assert dropped.split()[:3] == ["0", dropped.split()[1], "2"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model each of whose texts has control characters."""
    model = ModelFolder(tmp_path, "p", "a")
    record = ModelRecord(name="a", project="p", base_model=ESCAPES, lora=LoRAConfig())
    model.create(record, tmp_path / "engine.log")
    log(model, 1, {f"train/{ESCAPES}": 1.0, "train/reward": 0.5})
    calls = [{"id": ESCAPES, "function": {"name": ESCAPES, "arguments": ESCAPES}}]
    answer = {"role": "assistant", "content": ESCAPES, "reasoning_content": ESCAPES}
    choice = {"index": 0, "finish_reason": ESCAPES, "message": answer | {"tool_calls": calls}}
    messages = [
        {"role": ESCAPES, "content": ESCAPES, "name": ESCAPES},
        {"role": "tool", "content": [{"type": ESCAPES}], "tool_call_id": ESCAPES},
        choice,
    ]
    trajectory = TrajectoryBody(
        messages_and_choices=messages, reward=1.0, metrics={ESCAPES: 1}, metadata={ESCAPES: ESCAPES}, logs=[ESCAPES]
    )
    failures: Any = [{"type": ESCAPES, "message": ESCAPES}]
    group = TrajectoryGroupBody(trajectories=[trajectory], exceptions=failures, logs=[ESCAPES])
    model.write_lines("train", 1, pack_rows(map(trajectory_row, [group])))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs"],
        ["status"],
        ["show", "a"],
        ["show", "a", "--group", "0"],
        ["plot", "a", "--metric", f"train/{ESCAPES}"],
        ["plot", "a", "--metric", "none"],
        ["show", "none"],
    ],
    ids=str,
)
def test_control_characters_never_reach_the_terminal(hostile: Path, run: Run, arguments: list[str]) -> None:
    for more in ([], ["--json"]):
        _, out, err = run(*arguments, *more, "--path", hostile)
        assert out + err
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\x00"} & set(out + err)
        if arguments[0] == "show" and "none" not in arguments and not more:
            assert SHOWN_ESCAPES in out


def test_control_characters_never_reach_a_panel(hostile: Path, run: Run) -> None:
    document = json.loads(run("show", "a", "--group", "0", "--json", "--path", hostile).out)
    console = screen()
    print_show(console, document)
    assert "[bold]no markup[/] :smile:" in shown(console)
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\x00"} & set(shown(console))


def test_rollouts_are_chosen_by_their_reward(folder: Path, run: Run) -> None:
    def rewards(*flags: str) -> list[list[float]]:
        step = json.loads(run("show", "webnav-8b@1", *flags, "--json", "--path", folder).out)
        return [[rollout["reward"] for rollout in group["rollouts"]] for group in step["groups"]]

    everything = rewards()
    assert rewards("--sort=-reward") == [sorted(group) for group in everything]
    low = [[reward for reward in group if reward < 0.5] for group in everything]
    assert rewards("--below", "0.5") == [group for group in low if group] != everything
    nothing = run("show", "webnav-8b@1", "--below", "-9", "--group", "0", "--path", folder)
    assert nothing.code == 1 and "has no group 0 below -9" in nothing.err


def test_the_table_has_the_prompt_and_the_calls_with_their_arguments(tmp_path: Path, run: Run) -> None:
    model = ModelFolder(tmp_path, "p", "a")
    model.create(ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig()), tmp_path / "engine.log")
    log(model, 1, {"train/reward": 0.5})
    call = {"id": "c", "type": "function", "function": {"name": "find_order", "arguments": '{"id": "52"}'}}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}}
    tools = [{"type": "function", "function": {"name": "find_order", "parameters": {"type": "object"}}}]
    trajectory = TrajectoryBody(
        messages_and_choices=[{"role": "user", "content": "Where is order 52?"}, choice],
        tools=tools,
        reward=1.0,
        metrics={"won": True, "length": 0.25},
        metadata={"customer": "Ada"},
    )
    group = TrajectoryGroupBody(trajectories=[trajectory])
    model.write_lines("train", 1, pack_rows(map(trajectory_row, [group])))
    table = run("show", "a", "--path", tmp_path).out
    assert "won=1 length=0.25" in table
    assert "\nWhere is order 52?\n" in table and '→ find_order({"id": "52"})' in table
    assert "Ada" not in table and "find_order" in run("show", "a", "--text", "ada", "--path", tmp_path).out
    assert '"parameters": {"type": "object"}' in run("show", "a", "--group", "0", "--path", tmp_path).out


@pytest.mark.anyio
async def test_a_rollout_that_failed_is_shown_by_its_session(tmp_path: Path, run: Run) -> None:
    async with serving(tmp_path) as served:
        model = art.TrainableModel(name="a", project="p", base_model="base")
        async with art.Backend(served.url) as backend:
            await model.register(backend)

            async def fails() -> art.Trajectory:
                async with art.rollout(model, "first") as r:
                    await r.openai_client().chat.completions.create(
                        model=model.get_inference_name(),
                        messages=[{"role": "user", "content": "hello"}],
                        response_format={"type": "json_object"},
                    )
                    raise KeyError("no such order")

            with pytest.raises(KeyError) as failed:
                await art.gather_trajectories([fails()], max_exceptions=0)
            (note,) = [note for note in failed.value.__notes__ if "art show" in note]
            command = note.partition("`")[2].partition("`")[0].removeprefix("art ").split()
            ran = await asyncio.to_thread(run, *command)
            assert (ran.code, TEXT in ran.out, "hello" in ran.out) == (0, True, True), ran.err
            assert 'format {"type": "json_object"}' in ran.out
            other = await asyncio.to_thread(run, *command[:-3], "second", *command[-2:])
            assert other.code == 1 and "session second has no answer of p/a" in other.err


SCORES = (
    {
        "name": "thumb",
        "value": 1.0,
        "user": "5f2a91c0",
        "state": "trained",
        "reason": None,
        "trained_step": 6,
        "comment": None,
    },
    {
        "name": "tests",
        "value": 0.25,
        "user": None,
        "state": "dropped",
        "reason": "capped",
        "trained_step": None,
        "comment": ESCAPES,
    },
)


def test_a_rollout_shows_its_scores() -> None:
    shown_document = document(ENTRY)
    shown_document["rollouts"][0]["scores"] = SCORES
    console = screen(200)
    print_show(console, shown_document)
    assert "score thumb 1.000 by 5f2a91c0, trained step 6\n" in shown(console)
    assert f"score tests 0.250, dropped: capped: {SHOWN_ESCAPES}\n" in shown(console)
