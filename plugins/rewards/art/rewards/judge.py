"""`Judge`: a model behind an OpenAI-compatible address, or an async function, with its limits and its cache.

Answers are requested as JSON of a schema, or as plain text where the endpoint refuses schemas.
"""

import asyncio
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from tqdm.auto import tqdm

from art.core.model import Model
from art.errors import ArtError
from art.pool import run_all
from art.rewards.cache import AnswerCache
from art.rewards.judge_answers import Verdict, get, read_scores, schema_of
from art.scopes import no_capture

Messages: TypeAlias = list[dict[str, Any]]
JudgeFunction: TypeAlias = Callable[[Messages], Awaitable[str | None]]
JudgeModel: TypeAlias = "str | Model | JudgeFunction | Judge"

PROVIDERS = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "wandb": ("https://api.inference.wandb.ai/v1", "WANDB_API_KEY"),
}
"""For names PROVIDER/MODEL, as LiteLLM writes them: the provider's address, and the environment variable with the key."""
SETTINGS = ("base_url", "api_key", "timeout", "max_retries")
ALIASES = {"api_base": "base_url", "num_retries": "max_retries"}
"""Keys of `extra_litellm_params` that are not fields of the request's body."""
MAX_SHOWN, MAX_REPEATED = 300, 4_000
"""Number of characters that are kept of an endpoint's error message, and of an unusable answer in the second request."""
SECONDS, CONNECT_SECONDS = 600.0, 5.0
"""The default limits of a request and of its connection, which are openai's."""
WAITING_SECONDS = 15.0
"""A line says that a judge takes so long, once for each number of tries."""
MAX_JUDGES = 64
"""Number of judges that are kept for later calls with the same model and options."""


class JudgeError(ArtError):
    """A judge gave no usable answer, or none at all."""


class JudgeTimeoutError(JudgeError):
    """A judge took too long, in each of its tries."""


class _RefusedError(JudgeError):
    """The endpoint refused the body of the request."""


class _Call:
    """One call of `ask`: the client, and the tokens in the order of `Judge.prices`."""

    def __init__(self, endpoint: Model | None, ids: Sequence[str], is_shown: bool) -> None:
        self.endpoint, self.ids, self.is_shown = endpoint, ids, is_shown
        self.tokens = {} if endpoint is None else {"prompt": 0, "completion": 0}


@dataclass(eq=False, repr=False)
class Judge:
    """A judge with its own settings, for `ruler` and `ruler_score_group`.

    The first usable answer to a prompt is kept in memory, with `cache_dir` also as a file, and is not requested again.
    Answers of a trainable model are not kept, because the model's weights change.

    Raises:
        ValueError: the judge has no address or no key, or a setting does not fit the judge.
    """

    model: str | Model | JudgeFunction
    """The name of a model at `base_url`; "openai/MODEL" or "MODEL" at OpenAI, with the key OPENAI_API_KEY;
    "openrouter/MODEL" or "wandb/MODEL" at these providers, with OPENROUTER_API_KEY or WANDB_API_KEY; an `art.Model`; or an
    async function from messages to the answer's text."""
    base_url: str | None = None
    api_key: str | None = None
    timeout: float | None = None
    max_retries: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the request's body, such as temperature."""
    max_concurrent: int = 16
    requests_per_minute: float = math.inf
    """Requests start at equal intervals, and `max_concurrent` run at a time in each event loop."""
    prices: tuple[float, float] | None = None
    """The price of a million prompt tokens, and the price of a million completion tokens."""
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent < 1 or not self.requests_per_minute > 0:
            raise ValueError("max_concurrent is at least 1, and requests_per_minute is above 0")
        self.endpoint: Model | None = None
        endpoint_settings = (self.base_url, self.api_key, self.timeout, self.max_retries, self.options)
        model: Any = self.model  # Any: pyright takes a function for a Model of unknown type
        if isinstance(model, str | Model):
            named = cast("str | Model[Any]", model)
            self.endpoint = _to_endpoint(named, self.base_url, self.api_key)
        elif any((*endpoint_settings, self.prices, self.cache_dir)):
            raise ValueError("a judge that is a function has only limits: no address, options, files")
        self._takes_schema = "response_format" not in self.options
        self._slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._next_start = 0.0
        self._reported: set[str] = set()
        self._cache = AnswerCache(self.cache_dir)

    @property
    def name(self) -> str:
        """The judge's name in messages."""
        if self.endpoint is None:
            return repr(getattr(self.model, "__qualname__", type(self.model).__name__))
        host = urlsplit(self.endpoint.inference_base_url or "").netloc
        return f"'{self.endpoint.inference_model_name}' at {host}"

    async def ask(
        self, prompts: Sequence[Messages], ids: Sequence[str], *, is_shown: bool = False
    ) -> tuple[list[list[Verdict]], dict[str, int]]:
        """The verdicts on each prompt, one for each id, and the tokens; no tokens if the judge is a function.

        Raises:
            JudgeError: the judge does not answer, or gives two unusable answers to a prompt.
        """
        call = _Call(self.endpoint and self.endpoint._detached(), ids, is_shown)  # pyright: ignore[reportPrivateUsage]
        try:
            with no_capture():  # a policy that judges does not continue its rollout
                return await run_all(self._ask_one(call, prompt) for prompt in prompts), call.tokens
        finally:
            if call.endpoint is not None:
                await call.endpoint.close()

    async def _ask_one(self, call: _Call, prompt: Messages) -> list[Verdict]:
        address = self.endpoint and (self.endpoint.inference_base_url, self.name)
        key = json.dumps([address, dict(self.options), prompt], sort_keys=True, default=str)
        digest = hashlib.sha256(key.encode()).hexdigest()
        with suppress(ValueError):  # a file of the cache can contain anything
            if (kept := await self._cache.get(digest)) is not None:
                return read_scores(kept, call.ids)
        messages, problem = prompt, ""
        for _ in range(2):
            text = await self._send(call, messages)
            if call.is_shown:
                tqdm.write(self._without_key(f"judge {self.name}: {text}"), file=sys.stderr)
            try:
                verdicts = read_scores(text, call.ids)
            except ValueError as error:
                problem = str(error)
                answer = {"role": "assistant", "content": text[:MAX_REPEATED] or "(nothing)"}
                correction = f"This answer is not usable: {problem}. Answer again, with JSON only."
                messages = [*prompt, answer, {"role": "user", "content": correction}]
            else:
                if not getattr(self.model, "trainable", False):
                    await self._cache.put(digest, text)
                return verdicts
        pairwise = "mode='pairwise', " if len(call.ids) > 2 else ""
        remedy = f"Use a stronger judge, {pairwise}or a larger max_tokens"
        raise self._error(f"gave two unusable answers. The second: {problem}. {remedy}")

    async def _send(self, call: _Call, messages: Messages) -> str:
        if call.endpoint is None:
            async with self._turn():
                function: Any = self.model
                text: Any = await function([dict(message) for message in messages])
            if text is not None and not isinstance(text, str):
                raise TypeError(f"judge {self.name} returned {type(text).__name__}, not text")
            return text or ""
        if self._takes_schema:
            kind = {"name": "scores", "strict": True, "schema": schema_of(call.ids)}
            form = {"response_format": {"type": "json_schema", "json_schema": kind}}
            with suppress(_RefusedError):
                return await self._post(call, call.endpoint, messages, form)
        text = await self._post(call, call.endpoint, messages, {})
        self._takes_schema = False  # the same request without a schema was accepted
        return text

    async def _post(self, call: _Call, endpoint: Model, messages: Messages, form: dict[str, Any]) -> str:
        # Imported here, because importing openai takes most of a second.
        from openai import APIStatusError, OpenAIError, Timeout

        retries: dict[str, Any] = {} if self.max_retries is None else {"max_retries": self.max_retries}
        client: Any = endpoint.openai_client().with_options(timeout=Timeout(None, connect=CONNECT_SECONDS), **retries)
        chat, limit = client.chat.completions, SECONDS if self.timeout is None else self.timeout
        num_tries = 1 + client.max_retries
        name, body = endpoint.inference_model_name, form | dict(self.options)
        try:
            async with self._turn():
                create = chat.with_raw_response.create  # raw, because openai does not validate the answer
                # `create` has no parameters for the fields of other endpoints. It adds `extra_body` to the request as it is.
                request = functools.partial(create, model=name, messages=messages, extra_body=body)
                answer = await self._try(request, limit, num_tries)
            completion = json.loads(answer.http_response.content)
        except APIStatusError as error:
            kind = _RefusedError if error.status_code in (400, 422) else JudgeError
            reason = self._without_key(error.message)[:MAX_SHOWN]
            is_temporary = error.status_code == 429 or error.status_code >= 500
            raise self._error(f"answered: {reason}", kind, retryable=is_temporary) from None
        except OpenAIError as error:  # the text of the error's cause can contain the key
            reason = type(error.__cause__ or error).__name__
            raise self._error(f"did not answer ({reason})", retryable=True) from None
        except (ValueError, RecursionError):
            raise self._error("sent no chat completion") from None
        for kind in call.tokens:
            number = get(completion, "usage", f"{kind}_tokens")
            call.tokens[kind] += number if isinstance(number, int) else 0
        text = get(completion, "choices", 0, "message", "content")
        return text if isinstance(text, str) else ""

    async def _try(self, request: Callable[[], Awaitable[Any]], limit: float, num_tries: int) -> Any:
        """The answer to a request, which is sent again if it takes longer than `limit` seconds. openai sends a request again after
        other failures.

        Raises:
            JudgeTimeoutError: each try took too long.
        """
        for number in range(1, num_tries + 1):
            line = f"waiting for judge {self.name}: try {number} of {num_tries}, of at most {limit:g} s"
            timer = asyncio.get_running_loop().call_later(WAITING_SECONDS, self._report, line)
            try:
                async with asyncio.timeout(limit):
                    return await request()
            except TimeoutError:
                continue
            finally:
                timer.cancel()
        tries = "one try" if num_tries == 1 else f"{num_tries} tries"
        raise self._error(f"did not answer within {limit:g} s, in {tries}", JudgeTimeoutError, retryable=True) from None

    def _report(self, line: str) -> None:
        """Prints a line, once."""
        if line not in self._reported:
            self._reported.add(line)
            tqdm.write(self._without_key(line), file=sys.stderr)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
        """Waits until the limits allow a request."""
        slots = asyncio.Semaphore(self.max_concurrent)
        async with self._slots.setdefault(asyncio.get_running_loop(), slots):
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self.requests_per_minute
            await asyncio.sleep(start - now)
            yield

    def _error(self, text: str, kind: Any = JudgeError, *, retryable: bool = False) -> JudgeError:
        return kind(self._without_key(f"judge {self.name} {text}"), retryable=retryable)

    def _without_key(self, text: str) -> str:
        key = self.endpoint and self.endpoint.inference_api_key
        return text.replace(key, "***") if key else text


def _to_endpoint(model: str | Model, base_url: str | None, api_key: str | None) -> Model:
    """The judge's address, key and name at the address, as a model with its own client."""
    if isinstance(model, Model):
        name = model.get_inference_name()
        base_url, api_key = base_url or model.inference_base_url, api_key or model.inference_api_key
    elif base_url is None:
        name, base_url, api_key = _of_provider(model, api_key)
    else:
        name = _name_there(model)
    url = urlsplit(base_url or "")
    if not url.hostname or "@" in url.netloc or url.query:
        remedy = "pass base_url (http://HOST/v1) and the model's name there, or register the model"
        raise ValueError(f"judge '{name}' has no address that is known or usable: {remedy}")
    endpoint = Model(name="judge", project="judges", inference_model_name=name)
    endpoint.inference_base_url, endpoint.inference_api_key = base_url, (api_key or "").strip()
    return endpoint


def _of_provider(model: str, api_key: str | None) -> tuple[str, str | None, str | None]:
    """The name, address and key of a model that is named PROVIDER/NAME, or NAME at OpenAI."""
    provider, _, rest = model.partition("/")
    if not rest:
        provider = "openai"
    if provider not in PROVIDERS:
        return _name_there(model), None, api_key
    base_url, variable = PROVIDERS[provider]
    if provider == "openai":
        base_url = os.environ.get("OPENAI_BASE_URL") or base_url
    api_key = api_key or os.environ.get(variable)
    if not api_key:
        raise ValueError(f"judge '{model}' needs a key: set {variable} or pass api_key")
    return rest or model, base_url, api_key


def _name_there(model: str) -> str:
    """A model's name without the kind of endpoint, which LiteLLM puts before: 'hosted_vllm/qwen' -> 'qwen'."""
    provider, _, rest = model.partition("/")
    return rest if rest and provider in ("openai", "hosted_vllm") else model


_judges: OrderedDict[Hashable, Judge] = OrderedDict()


def to_judge(model: JudgeModel, extra_params: Mapping[str, Any] | None) -> Judge:
    """The judge for a model and options. Calls with the same model and options share a judge, its limits and its cache."""
    params = {name: value for name, value in (extra_params or {}).items() if value is not None}
    options = {ALIASES.get(name, name): value for name, value in params.items()}
    if isinstance(model, Judge):
        if options:
            raise ValueError("pass these options to Judge(...): its settings do not change")
        return model
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    judge = Judge(model, **settings, options=options)
    target: Any = judge.endpoint.model_dump_json() if judge.endpoint is not None else model
    target = target if isinstance(target, Hashable) else id(target)
    judge = _judges.setdefault(key := (type(model), target, f"{settings} {options}"), judge)
    _judges.move_to_end(key)
    if len(_judges) > MAX_JUDGES:
        _judges.popitem(last=False)
    return judge
