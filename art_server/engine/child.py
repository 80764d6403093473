"""vLLM's API server with one seam: its engine client reports what was really sampled.

Started by `process.py` as `python -m art_server.engine.child RECORDS_SOCKET [vLLM's flags]`. Every API that vLLM serves
(chat, completions, responses, messages; streaming or not) samples through `engine_client.generate`; the wrapper asks
for the log-probabilities of the sampled tokens, hides them again when the client did not ask, and sends one JSON line
for each finished choice to the server. The HTTP answers stay vLLM's own.

This file is the only one that touches vLLM's internals (0.32.0); `tests/integration/test_engine.py` tells when they move.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    # vLLM's own worker processes are forked or spawned from here: both ways they take the signal over.
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)


class RecordSender:
    """Sends records over the server's socket, in order, without making the engine wait."""

    def __init__(self, socket_path: str):
        self._socket_path = socket_path
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        _, self._writer = await asyncio.open_unix_connection(self._socket_path)

    def send(self, record: dict[str, Any]) -> None:
        assert self._writer is not None, "connect() comes first"
        self._writer.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


class ChoiceRecorder:
    """Collects one choice's tokens, whether the engine hands them out at once or as deltas."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def add(self, token_ids: Any, logprobs: Any) -> None:
        ids = [int(token) for token in token_ids]
        self.token_ids += ids
        self.logprobs += [
            float(entry[token].logprob) for token, entry in zip(ids, logprobs or (), strict=True)
        ]


def sampling_summary(params: Any) -> dict[str, Any]:
    """The sampling parameters that decide what the sampled log-probabilities mean."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "n": params.n,
        "max_tokens": params.max_tokens,
        "structured": params.structured_outputs is not None,
    }


def record_generate(generate: Any, sender: RecordSender) -> Any:
    """Wrap `engine_client.generate`: the same outputs, and a record of each finished choice."""

    async def recorded(
        prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        hide_logprobs = sampling_params.logprobs is None
        if hide_logprobs:
            sampling_params.logprobs = 0
        lora = options.get("lora_request")
        choices: dict[int, ChoiceRecorder] = {}
        async for result in generate(prompt, sampling_params, request_id, **options):
            for output in result.outputs:
                recorder = choices.setdefault(output.index, ChoiceRecorder())
                recorder.add(output.token_ids, output.logprobs)
                if hide_logprobs:
                    output.logprobs = None
                if output.finish_reason is not None:
                    sender.send(
                        {
                            "request_id": request_id,
                            "index": output.index,
                            "adapter": lora.lora_name if lora else None,
                            "prompt_token_ids": list(result.prompt_token_ids or ()),
                            "token_ids": recorder.token_ids,
                            "logprobs": recorder.logprobs,
                            "finish_reason": output.finish_reason,
                            "stop_reason": output.stop_reason,
                            "sampling": sampling_summary(sampling_params),
                        }
                    )
            yield result

    return recorded


def main() -> None:
    """Run vLLM's API server with the wrapped engine client, until it is told to stop."""
    from vllm.entrypoints.launchers.api_server import entry

    sender = RecordSender(sys.argv.pop(1))
    serve_with_vllm = entry.build_and_serve

    async def build_and_serve(engine_client: Any, *args: Any, **kwargs: Any) -> Any:
        await sender.connect()
        engine_client.generate = record_generate(engine_client.generate, sender)
        return await serve_with_vllm(engine_client, *args, **kwargs)

    entry.build_and_serve = build_and_serve
    entry.main()


if __name__ == "__main__":
    main()
