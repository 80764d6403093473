"""Reading bodies: limits, depth, and trajectories one by one."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_protocol.wire import JobEvent, TrainRequest
from tests.quick.api.test_art_wire import client, make, use_runner


def large_body(megabytes: int) -> bytes:
    """Of trajectories as OpenAI's clients send them back, an entry of log-probabilities a token."""
    entry = {"token": "token_id:517", "bytes": [111, 107], "logprob": -0.251234, "top_logprobs": []}
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": "ok " * 1000},
        "logprobs": {"content": [entry] * 1000, "refusal": None},
    }
    messages = [{"role": "user", "content": "hi"}, choice]
    one = msgspec.json.encode({"messages_and_choices": messages, "reward": 0.5})
    group = b'{"trajectories": [' + b", ".join([one] * 8) + b"]}"
    number = megabytes * 10**6 // len(group)
    return b'{"groups": [' + b", ".join([group] * number) + b"]}"


class Runner:
    """Takes every job, and remembers how large it was."""

    num_trajectories = 0

    async def find(self, *_: Any) -> None:
        return None

    async def accept(self, model: Any, request: TrainRequest, *_: Any) -> JobEvent:
        self.num_trajectories = sum(len(group.trajectories) for group in request.groups)
        return JobEvent(event="accepted", job_id="j")

    async def follow(self, job_id: str) -> Any:
        yield JobEvent(event="done", job_id=job_id)


async def longest_stall(running: asyncio.Task[Any]) -> float:
    """Seconds of this process's work during which the event loop did not answer; other programs' time does not count."""
    longest = 0.0
    while not running.done():
        before = time.process_time()
        await asyncio.sleep(0.005)
        longest = max(longest, time.process_time() - before)
    return longest


ART_CALL = b'{"model": {"name": "run", "project": "p"}, "trajectory_groups"'


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "start"), [("/api/models/p/run/train", b'{"groups"'), ("/_train_model", ART_CALL)]
)
async def test_a_large_train_request_does_not_stall_the_others(
    tmp_path: Path, path: str, start: bytes
) -> None:
    """76 MB at once would hold the loop for more than a second, and the search for garbage after it for another."""
    app, service = make(tmp_path)
    runner = Runner()
    use_runner(service, runner)
    body = large_body(76).replace(b'{"groups"', start)
    async with client(app, timeout=300) as http:
        posting = asyncio.create_task(http.post(path, content=body))
        stall = await longest_stall(posting)
    assert posting.result().status_code == 200
    assert runner.num_trajectories == body.count(b"reward")
    assert stall < 0.25
