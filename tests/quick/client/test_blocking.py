"""A rollout that blocks the event loop is named once, with its line."""

import asyncio
import http.server
import logging
import threading
import time

import httpx
import pytest

import art
from art import blocking

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "SAID_SECONDS", 0.2)
    monkeypatch.setattr(blocking, "BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr(blocking, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(blocking, "_said", set())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "art.blocking"]


async def sleeping() -> art.Trajectory:
    time.sleep(0.4)  # noqa: ASYNC251
    return art.Trajectory(reward=1.0)


async def sleeping_in_a_task() -> art.Trajectory:
    return await asyncio.create_task(sleeping())


async def waiting() -> art.Trajectory:
    await asyncio.sleep(0.4)
    await asyncio.to_thread(time.sleep, 0.4)
    return art.Trajectory(reward=1.0)


async def gather(rollout) -> None:
    await art.gather_trajectory_groups([art.TrajectoryGroup(rollout() for _ in range(3))], pbar_desc=None)


@pytest.mark.parametrize("rollout", [sleeping, sleeping_in_a_task])
async def test_the_line_is_said_once(rollout, caplog: pytest.LogCaptureFixture) -> None:
    await gather(rollout)
    (text,) = warnings_of(caplog)
    number = sleeping.__code__.co_firstlineno + 1
    assert text.startswith(f"{__file__}, line {number} blocked the event loop") and "`time.sleep(0.4)" in text
    assert "AsyncOpenAI" in text and "asyncio.to_thread" in text
    await gather(rollout)
    assert len(warnings_of(caplog)) == 1


class _Slow(http.server.BaseHTTPRequestHandler):
    """Answers after a while, from a thread."""

    def do_GET(self) -> None:
        time.sleep(0.4)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


async def test_a_synchronous_client_is_named_also_where_its_requests_are_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}")

    async def asking() -> art.Trajectory:
        with art.capture("a"):
            client.get("/")  # noqa: ASYNC212
        return art.Trajectory(reward=1.0)

    try:
        await gather(asking)
    finally:
        client.close()  # noqa: ASYNC212
        server.shutdown()
        server.server_close()
    (text,) = warnings_of(caplog)
    assert f"line {asking.__code__.co_firstlineno + 2} blocked" in text and '`client.get("/")' in text


async def test_rollouts_that_await_block_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await gather(waiting)
    assert warnings_of(caplog) == [] and blocking._watched == {}


async def test_the_programs_own_code_between_rollouts_is_no_rollout(caplog: pytest.LogCaptureFixture) -> None:
    async def judged(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        return group

    await art.gather_trajectory_groups(
        [art.TrajectoryGroup(waiting() for _ in range(2))], after_each=judged, pbar_desc=None
    )
    time.sleep(0.4)  # noqa: ASYNC251
    assert warnings_of(caplog) == []
