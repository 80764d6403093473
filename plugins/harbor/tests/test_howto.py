"""The Python of docs/howto/harbor.md runs as it stands, against a server that samples "maybe"."""

import shutil
from pathlib import Path

import pytest

import art
from plugins.harbor.tests.boxed import TASKS, left, needs_bubblewrap
from tests.fakes.server import FakeArt
from tests.pages import blocks, run

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

AGENT = """
echo "$1" > asked.txt
echo hello > hello.txt
"""


async def test_the_page_trains_an_agent(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("hello-file", "sorted-numbers"):
        shutil.copytree(TASKS / name, tmp_path / "tasks" / name)
    (home / "agents").mkdir()
    (home / "agents" / "agent.sh").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    server = FakeArt()
    await server.start()
    try:
        async with art.Backend(server.url) as backend:
            model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
            await model.register(backend)
            names = {"art": art, "model": model}
            for number in range(len(blocks("harbor.md", "python"))):
                await run("harbor.md", number, names)
    finally:
        await server.stop()
    assert "hello-file 1.0" in capsys.readouterr().out
    (trained,) = [request for request in server.requests if request.path.endswith("/train")]
    rewards = [[trajectory["reward"] for trajectory in group["trajectories"]] for group in trained.json()["groups"]]
    assert rewards == [[1.0] * 8, [0.0] * 8]
    assert left() == []
