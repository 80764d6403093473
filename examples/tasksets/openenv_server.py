"""An OpenEnv environment on this machine: the agent repeats a text, and the reward is the share of the text that is right.

.venv-verifiers/bin/python examples/tasksets/openenv_server.py 8765
.venv-verifiers/bin/python examples/tasksets/train.py --config '{"player": {"max_turns": 1}, "taskset":
    {"id": "openenv", "base_url": "http://127.0.0.1:8765", "resets": [{"seed": 0}, {"seed": 1}, ...]}}'
"""

import difflib
import random
import sys
import uuid
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WORDS = [
    "red",
    "blue",
    "green",
    "black",
    "white",
    "north",
    "south",
    "east",
    "west",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
]


class Say(Action):
    text: str


class Heard(Observation):
    text: str = ""


class Echo(Environment[Say, Heard, State]):
    """One turn; the seed of `reset` draws the text."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid.uuid4()), step_count=0)
        self._wanted = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        self._wanted = " ".join(random.Random(seed).sample(WORDS, 3))
        return Heard(text=f"Repeat: {self._wanted}")

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        self._state.step_count += 1
        reward = difflib.SequenceMatcher(None, action.text.strip(), self._wanted).ratio()
        return Heard(text="", reward=reward, done=True)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
