"""The rules of the reward's files, as a table. The same rules hold for the files that a box's tests write (test_faults.py)."""

import pytest

from art.harbor import RewardInvalid
from art.harbor.rewards import read_reward

RIGHT = {
    "a text": ({"reward.txt": b"1\n"}, 1.0, {}),
    "a fraction": ({"reward.txt": b" 0.25 "}, 0.25, {}),
    "below 0": ({"reward.txt": b"-1e-3"}, -0.001, {}),
    "an object": ({"reward.json": b'{"reward": 0.5, "speed": 2}'}, 0.5, {"speed": 2.0}),
    "one number of any name": ({"reward.json": b'{"passed": 1}'}, 1.0, {"passed": 1.0}),
    "JSON before text": ({"reward.txt": b"0", "reward.json": b'{"reward": 1}'}, 1.0, {}),
    "other files": ({"reward.txt": b"1", "log": b"x", "link": None}, 1.0, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_reward(name: str) -> None:
    files, reward, numbers = RIGHT[name]
    assert read_reward(files) == (reward, numbers)


WRONG = {
    "missing": {},
    "another name": {"Reward.txt": b"1"},
    "empty": {"reward.txt": b""},
    "white space": {"reward.txt": b" \n"},
    "a word": {"reward.txt": b"pass"},
    "two numbers": {"reward.txt": b"1\n0\n"},
    "NaN": {"reward.txt": b"nan"},
    "infinite": {"reward.txt": b"-inf"},
    "too large for a float": {"reward.txt": b"1e999"},
    "bytes": {"reward.txt": b"\xff1"},
    "a link or a folder": {"reward.txt": None},
    "empty JSON": {"reward.json": b"", "reward.txt": b"1"},
    "broken JSON": {"reward.json": b'{"reward": 1', "reward.txt": b"1"},
    "a link as JSON": {"reward.json": None, "reward.txt": b"1"},
    "deep JSON": {"reward.json": b"[" * 100_000},
    "NaN in JSON": {"reward.json": b'{"reward": NaN}'},
    "infinite in JSON": {"reward.json": b'{"reward": 1e999}'},
    "a huge integer": {"reward.json": b'{"reward": 1' + b"0" * 400 + b"}"},
    "a text in JSON": {"reward.json": b'{"reward": "1"}'},
    "a boolean": {"reward.json": b'{"reward": true}'},
    "null": {"reward.json": b'{"reward": null}'},
    "a bare number": {"reward.json": b"0.75"},
    "a list": {"reward.json": b"[1]"},
    "an empty object": {"reward.json": b"{}"},
    "parts without a reward": {"reward.json": b'{"a": 1, "b": 0}'},
    "a part that is NaN": {"reward.json": b'{"reward": 1, "a": NaN}'},
}


@pytest.mark.parametrize("name", WRONG)
def test_no_reward_is_an_error_and_never_0(name: str) -> None:
    with pytest.raises(RewardInvalid):
        read_reward(WRONG[name])
