"""Ten tasks of our own in five styles: the solution gets 1, an agent that does nothing gets 0."""

import pytest

from art import harbor
from art.harbor.running import play
from plugins.harbor.tests.boxed import TASKS, left, needs_bubblewrap

pytestmark = [pytest.mark.anyio, needs_bubblewrap]


@pytest.mark.parametrize("task", harbor.tasks(TASKS), ids=lambda task: task.name)
async def test_the_solution_gets_1_and_nothing_gets_0(task: harbor.Task) -> None:
    assert (await harbor.solve(task)).reward == 1.0
    assert (await play(task, "true")).reward == 0.0
    assert left() == []
