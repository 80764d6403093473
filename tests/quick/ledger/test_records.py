"""The line from the engine's process: what cannot be taken is lost alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_server.engine.vllm_process.child import LedgerClient, record_generate
from art_server.ledger.intake import RecordReceiver
from art_server.shared.engine_messages import FinishedChoice
from tests.waiting import until

pytestmark = pytest.mark.anyio


def sample(request_id: str, **changed: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "index": 0,
        "text": "yes",
        "token_ids": [1],
        "logprobs": [-0.5],
        "finish_reason": "stop",
        "stop_reason": None,
        "sampling": {"n": 2},
    } | changed


class Server:
    """What the receiver's handlers take and lose."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.lost: list[tuple[str, int, int]] = []

    def on_prompt(self, request_id: str, rendered: list[int]) -> list[int] | None:
        if request_id == "broken":
            raise RuntimeError("the ledger's disk is full")
        return [*rendered, 7]

    def on_samples(self, samples: Sequence[FinishedChoice]) -> None:
        if any(sample.request_id == "refused" for sample in samples):
            raise RecursionError("maximum recursion depth exceeded")
        self.taken += [sample.request_id for sample in samples]

    def on_lost(self, request_id: str, index: int, num: int, error: Exception) -> None:
        assert str(error)
        self.lost.append((request_id, index, num))


async def test_what_cannot_be_taken_is_lost_alone_and_the_line_stays(tmp_path: Path) -> None:
    server = Server()
    receiver = RecordReceiver(server.on_prompt, server.on_samples, server.on_lost)
    await receiver.listen(tmp_path / "records.sock")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "records.sock")
    lines = [
        sample("first"),
        sample("no number", logprobs=[None], index=1),
        sample("refused"),
        {"request_id": "broken", "prompt": [1, 2]},
        sample("last"),
        {"request_id": "asks", "prompt": [1, 2]},
    ]
    content = [json.dumps(line).encode() for line in lines]
    content.insert(3, b"this is no JSON")
    writer.write(b"\n".join(content) + b"\n")
    answers = [json.loads(await reader.readline()) for _ in range(2)]
    assert answers == [
        {"request_id": "broken", "token_ids": None, "is_stored": False},
        {"request_id": "asks", "token_ids": [1, 2, 7], "is_stored": True},
    ]
    writer.write(json.dumps(sample("after")).encode() + b"\n")
    await until(lambda: "after" in server.taken)
    assert server.taken == ["first", "last", "after"]
    assert server.lost == [("no number", 1, 2), ("refused", 0, 2)]
    writer.close()
    await receiver.close()


async def test_a_prompt_that_could_not_be_stored_comes_with_its_samples(tmp_path: Path) -> None:
    server = Server()
    taken: list[FinishedChoice] = []
    receiver = RecordReceiver(server.on_prompt, taken.extend, server.on_lost)
    await receiver.listen(tmp_path / "records.sock")
    client = LedgerClient(str(tmp_path / "records.sock"))
    await client.connect()
    params = SimpleNamespace(
        logprobs=1,
        max_tokens=4,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        **dict.fromkeys(["presence_penalty", "frequency_penalty", "min_tokens"], 0),
        repetition_penalty=1.0,
        n=1,
        structured_outputs=None,
        logit_bias=None,
        **dict.fromkeys(["bad_words", "allowed_token_ids", "thinking_token_budget"]),
    )
    chosen = SimpleNamespace(
        index=0,
        text="x",
        token_ids=[5],
        logprobs=[{5: SimpleNamespace(logprob=-0.5)}],
        sampling_mask=None,
        finish_reason="stop",
        stop_reason=None,
    )

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[chosen])

    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    recorded = record_generate(generate, client, max_model_len=100)
    assert [output async for output in recorded(prompt, params, "broken")]
    await until(lambda: taken)
    assert taken[0].rendered == [1, 2]
    assert client._reading is not None and client._writer is not None
    client._reading.cancel()  # it ends its process with the server
    client._writer.close()
    await receiver.close()
