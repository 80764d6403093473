"""A fake vLLM: the routes by which the engine steers it, and those by which the server samples. tests/contracts.py holds it
to the real one."""

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from art_server.shared.engine_messages import FinishedChoice

METRICS = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
PROMPT, ANSWER, TEXT = [5, 6, 7], [8, 9], "a private answer"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
"""What an answer of /v1/responses has behind its text."""
CONTROLS = ("pause", "resume", "sleep", "reset_prefix_cache", "wake_up")


class FakeVllm:
    """Samples the same two tokens for each request, and records them as vLLM does."""

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self.is_paused = False
        self.take_samples: Callable[[list[tuple[str, int, int, FinishedChoice]]], object] = lambda _: None
        self.num_dying = 0
        """For so many requests it dies while it answers, and is back afterwards."""
        self.is_dead = False
        """It died in its last request."""
        self.logprob_of: Callable[[str, list[int], int], float] = lambda name, prompt, position: -0.5
        """What it gives for a token of a prompt: of the model's name, the prompt, and the token's position."""
        self.num_refusing = 0
        """So many completions get an error 500."""
        self.scored: list[tuple[str, list[int]]] = []
        """The models and prompts whose log-probabilities were asked for."""
        self.may_score = asyncio.Event()
        """Until it is set, those requests wait."""
        self.may_score.set()
        self.endless: set[str] = set()
        """Adapters whose completions do not end before their limit."""
        self.chats: list[dict[str, Any]] = []
        """The bodies of the requests to /v1/chat/completions."""
        self.responses: list[dict[str, Any]] = []
        """The bodies of the requests to /v1/responses."""
        self._site: web.AppRunner | None = None

    async def listen(self) -> str:
        """Its address on this machine."""
        app = web.Application()
        app.add_routes(self.routes())
        self._site = web.AppRunner(app)
        await self._site.setup()
        await web.TCPSite(self._site, "127.0.0.1", 0).start()
        host, port = self._site.addresses[0]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._site is not None:
            await self._site.cleanup()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/v1/completions", self._complete),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/responses", self._respond),
            web.post("/v1/load_lora_adapter", self._load),
            web.post("/v1/unload_lora_adapter", self._unload),
            *(web.post(f"/{route}", self._control) for route in CONTROLS),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 4096}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        choice: dict[str, Any] = {"index": 0, "text": TEXT, "finish_reason": "stop"}
        answer = ANSWER
        if self.num_refusing:
            self.num_refusing -= 1
            return refusal(500, "InternalServerError", "it cannot compute")
        if body["model"] in self.endless:
            answer = (ANSWER * body["max_tokens"])[: body["max_tokens"]]
            choice |= {"text": TEXT * 9, "finish_reason": "length"}
        if body.get("return_token_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": body["prompt"]}
        if "prompt_logprobs" in body:
            name, prompt = body["model"], body["prompt"]
            self.scored.append((name, prompt))
            await self.may_score.wait()
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": self.logprob_of(name, prompt, position)}}
                for position, token in enumerate(prompt)
                if position > 0
            ]
        return web.json_response({"model": body["model"], "choices": [choice]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            text = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return refusal(400, "InvalidUserInput", text)
        if not (Path(body["lora_path"]) / "adapter_config.json").exists():
            return refusal(404, "NotFoundError", "no such adapter")
        self.adapters.append(body["lora_name"])
        return web.Response(text="loaded")

    async def _unload(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] not in self.adapters:
            return refusal(404, "NotFoundError", "no such adapter")
        self.adapters.remove(body["lora_name"])
        return web.Response(text="unloaded")

    async def _control(self, request: web.Request) -> web.Response:
        if request.path in ("/pause", "/resume"):
            self.is_paused = request.path == "/pause"
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.chats.append(body)
        is_stream = body.get("stream", False)
        if self.num_dying:
            self.num_dying -= 1
            self.is_dead = True
            error = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
            return events(error) if is_stream else web.json_response(error, status=500)
        request_id = request.headers.get("x-request-id", uuid.uuid4().hex)
        self._sample(request_id)
        message = {"role": "assistant", "content": TEXT}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5} for _ in ANSWER]}
        answer = {"id": f"chatcmpl-{request_id}", "created": 0, "model": body["model"]}
        if is_stream:
            choice["delta"] = choice.pop("message")
            return events({**answer, "object": "chat.completion.chunk", "choices": [choice]})
        return web.json_response({**answer, "object": "chat.completion", "choices": [choice]})

    async def _respond(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.responses.append(body)
        self._sample(request.headers["x-request-id"], TEXT + CALL)
        number = len(self.responses)
        call = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": "add"}
        text = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": None}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [text], "status": None}
        response = {
            "id": body["request_id"],
            "object": "response",
            "model": body["model"],
            "output": [message, {**call, "arguments": '{"a": 1}', "status": "completed"}],
            "previous_response_id": body.get("previous_response_id"),
        }
        if not body.get("stream"):
            return web.json_response(response, dumps=compact)
        parts = [{"type": f"response.{end}", "response": response} for end in ("created", "completed")]
        text = "".join(f"event: {part['type']}\ndata: {compact(part)}\n\n" for part in parts)
        return web.Response(text=text, content_type="text/event-stream")

    def _sample(self, request_id: str, text: str = TEXT) -> None:
        sample = FinishedChoice(
            request_id=request_id,
            rendered=PROMPT,
            index=0,
            text=text,
            token_ids=ANSWER,
            logprobs=[-0.5] * len(ANSWER),
            finish_reason="stop",
            stop_reason=None,
            sampling={"n": 1, "temperature": 1.0},
        )
        self.take_samples([(request_id, 0, 0, sample)])


def compact(value: Any) -> str:
    """JSON without spaces, as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"))


def refusal(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


def events(*contents: Any) -> web.Response:
    """Server-sent events, written as vLLM does."""
    texts = [compact(content) for content in contents]
    text = "".join(f"data: {event}\n\n" for event in [*texts, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")
