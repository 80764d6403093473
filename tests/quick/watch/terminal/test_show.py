"""What `art show` prints: groups as tables, rollouts in panels, and nothing that a terminal obeys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_protocol.history import pack_rows, trajectory_row
from art_protocol.wire import LoRAConfig, TrajectoryBody, TrajectoryGroupBody
from art_server.store.model_folder import ModelFolder, ModelRecord
from art_watch.terminal.show import print_show
from tests.makers.demo import log
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
