"""The cells of docs/howto/notebook.md run in a Jupyter kernel, against a server that samples "maybe" and trains nothing."""

import asyncio
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.fakes.server import Answer, FakeArt
from tests.pages import SERVERS, blocks
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


def make_notebook(url: str, *more: str) -> NotebookClient:
    """The page's cells but the last, which closes the backend, and further ones."""
    cells = [*blocks("notebook.md", "python")[:-1], *more]
    for address in SERVERS:
        cells = [cell.replace(address, url) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return NotebookClient(notebook, kernel_name="python3", timeout=PATIENCE_SECONDS, allow_errors=True)


def shown(client: NotebookClient, number: int) -> str:
    """The text that a cell shows: streams, values and errors."""
    texts: list[str] = []
    outputs: list[dict[str, Any]] = client.nb.cells[number].outputs
    for output in outputs:
        value = output.get("data", {}).get("text/plain", "")
        texts += [output.get("text", ""), value, output.get("ename", "")]
    return "".join(texts)


async def test_the_page_is_a_notebook(fake: FakeArt) -> None:
    close = blocks("notebook.md", "python")[-1]
    client = make_notebook(fake.url, "await model.train(groups)", "import asyncio", close)
    client.nb.cells[-2].source += "\nasyncio.run(model.get_step())"
    await client.async_execute()
    assert "gather: 100%" in shown(client, 1) and "16/16" in shown(client, 1)
    assert shown(client, 1).count("TrajectoryGroup(rewards=[1.0, 1.0, 1.0, 1.0, 1.0, ") == 2
    assert "train (train): 100%" in shown(client, 2) and "2/2" in shown(client, 2)
    assert "TrainResult(step=1, metrics={'train/reward': 1.0} and " in shown(client, 2)
    assert shown(client, 3).endswith("TrainResult(step=2, metrics={'train/reward': 1.0} and 4 more)")
    assert shown(client, 4) == "RuntimeError", "asyncio.run in a notebook"
    assert shown(client, 5) == ""


async def test_the_train_bar_shows_without_being_asked_for(fake: FakeArt) -> None:
    client = make_notebook(fake.url, "await model.train(groups)")
    await client.async_execute()
    assert "train (train): 100%" in shown(client, 3)


async def test_an_interrupted_cell_leaves_the_backend_usable(fake: FakeArt) -> None:
    arrived = asyncio.Event()

    def accept_and_go_away(request: Any) -> Answer:
        arrived.set()
        return Answer(lines=[{"event": "accepted", "job_id": "j"}], hang_up=True)

    fake.on("POST", "/api/models/demo/agent/train", accept_and_go_away)
    fake.on("GET", "/api/jobs/j/events", Answer(503, {}))
    client = make_notebook(fake.url, "await model.get_step()")
    async with client.async_setup_kernel():
        for number in (0, 1):
            await client.async_execute_cell(client.nb.cells[number], number)
        training = asyncio.create_task(client.async_execute_cell(client.nb.cells[2], 2))
        await asyncio.wait_for(arrived.wait(), PATIENCE_SECONDS)
        kernel: Any = client.km  # traitlets have no types
        await kernel.interrupt_kernel()
        await training
        fake.steps["demo/agent"] += 1  # the accepted job was trained meanwhile
        await client.async_execute_cell(client.nb.cells[3], 3)
    assert shown(client, 2).endswith(("KeyboardInterrupt", "CancelledError"))
    assert shown(client, 3) == "1"
