"""What `art status` says of models that learn from scores."""

from typing import Any

import pytest

from art_protocol.learning import Policy
from art_watch.terminal.learn import learning_lines
from art_watch.terminal.tables import print_status
from tests.fakes.page_server import LEARNER, learning_info
from tests.quick.watch.terminal.conftest import ESCAPES, screen, shown

CANARY = learning_info().model_dump(mode="json")
RELEASE: dict[str, Any] = {"incumbent": 12, "passed": 12, "candidate": None, "arms": [], "z": None}
PLAIN = {
    "state": "on",
    "policy": Policy().model_dump(),
    "reason": "61 of 128 scored answers wait",
    "counts": {"scored": 61},
    "serving_step": 12,
    "release": None,
}
LINES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a canary": (
        CANARY,
        [
            "p/a  serving 12  canary 16 (30%)  +0.04 (z 1.1)  412 of 800 scores  waiting 61 of 128  dropped 9 (capped)",
        ],
    ),
    "a canary with too few users": (
        CANARY | {"release": CANARY["release"] | {"z": None}, "counts": {}},
        ["p/a  serving 12  canary 16 (30%)  412 of 800 scores  waiting 0 of 128"],
    ),
    "no release": (PLAIN, ["p/a  serving 12  waiting 61 of 128", "  61 of 128 scored answers wait"]),
    "paused": (
        PLAIN
        | {
            "state": "paused",
            "reason": "learning is paused: 3 steps in a row were refused",
            "counts": {"dropped": 5, "dropped: capped": 2, "dropped: too_old": 3},
        },
        [
            "p/a  serving 12  waiting 0 of 128  dropped 5 (2 capped, 3 too_old)",
            "  learning is paused: 3 steps in a row were refused",
        ],
    ),
    "a refused step": (
        PLAIN | {"release": RELEASE | {"state": "steps", "passed": 13, "reason": "the guard has refused step 14"}},
        [
            "p/a  serving 12  guarded 13  waiting 61 of 128",
            "  61 of 128 scored answers wait",
            "  refused: the guard has refused step 14",
        ],
    ),
    "rolled back": (
        PLAIN | {"release": RELEASE | {"state": "rolled_back", "reason": "the canary is not better"}},
        [
            "p/a  serving 12  waiting 61 of 128",
            "  61 of 128 scored answers wait",
            "  rolled back: the canary is not better",
        ],
    ),
    "promoted": (
        PLAIN | {"release": RELEASE | {"state": "promoted", "reason": "step 12 has passed the guard"}},
        ["p/a  serving 12  waiting 61 of 128", "  61 of 128 scored answers wait"],
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_a_model_that_learns_has_a_line(case: str) -> None:
    info, lines = LINES[case]
    assert learning_lines("p/a", info) == lines


def test_the_status_shows_the_lines_and_obeys_no_escapes() -> None:
    health = {"version": "1", "engine": "ready", "base_model": None, "detail": None, "replicas": [], "waits_for": None}
    live = {
        "health": health | {"faults": {}},
        "activity": {"shares": {}, "sentence": ""},
        "jobs": [],
        "learning": {LEARNER: PLAIN | {"reason": ESCAPES}},
    }
    console = screen(200)
    print_status(console, "here", {"live": live, "models": []})
    assert f"{LEARNER}  serving 12" in shown(console) and "\x1b[31m" not in shown(console)
