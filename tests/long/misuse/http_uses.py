"""Wrong requests, by httpx and by OpenAI's client."""

from functools import partial

from tests.long.misuse.use import Use

HTTP = """
import os
import sys

import httpx

MODEL = "tests/kept"
HI = [{"role": "user", "content": "hi"}]
http = httpx.Client(base_url=os.environ["ART_SERVER_URL"], timeout=None)
answer = LINES
print(answer.text)
sys.exit(1 if answer.is_error else 0)
""".replace("answer = LINES", "LINES")
KEYED = HTTP.replace("ART_SERVER_URL", "KEYED_URL")
OPENAI = """
import os

import openai

MODEL = "tests/kept"
HI = [{"role": "user", "content": "hi"}]
URL = os.environ["ART_SERVER_URL"]
LINES
"""


def request(name: str, wrong: str, cause: str, remedy: str, mended: str, template: str = HTTP, **more: str) -> Use:
    """A use whose forms are expressions of an answer."""
    return Use(name, f"answer = {wrong}", cause, remedy, f"answer = {mended}", template, **more)  # type: ignore[arg-type]


def chat(name: str, wrong: str, cause: str, remedy: str, mended: str) -> Use:
    """A use whose forms are fields of a chat request."""
    body = 'http.post("/v1/chat/completions", json={{"model": MODEL, "messages": HI, "max_tokens": 4, **{}}})'
    return request(name, body.format(wrong), cause, remedy, body.format(mended))


keyed = partial(request, template=KEYED)

SAMPLING = [
    chat("no token to answer with", '{"max_tokens": 0}', "max_tokens", "at least 1", '{"max_tokens": 1}'),
    chat(
        "a negative temperature",
        '{"temperature": -1}',
        "temperature.*-1",
        "non-negative|at least 0",
        '{"temperature": 0}',
    ),
    chat("a top_p above 1", '{"top_p": 2}', "top_p.*2", r"in \(0, 1\]", '{"top_p": 1}'),
    chat("the number of choices as a text", '{"n": "8"}', "n: .*not a text", "it must be a number", '{"n": 8}'),
    chat(
        "ten thousand choices",
        '{"n": 10000}',
        "the request asks for 10000 choices",
        "above the limit of .*ask for fewer",
        '{"n": 8}',
    ),
    chat(
        "more alternatives of a token than the engine records",
        '{"logprobs": True, "top_logprobs": 100}',
        "Requested sample logprobs of 100",
        "max allowed: 20",
        '{"logprobs": True, "top_logprobs": 20}',
    ),
    chat(
        "beam search",
        '{"use_beam_search": True}',
        "beam search samples no tokens that can be trained",
        "leave out use_beam_search, or ask for several choices with n",
        '{"n": 4}',
    ),
    chat(
        "an earlier option of vLLM for grammars",
        '{"guided_regex": "yes|no"}',
        "guided_regex: the engine does not know this option",
        "use `structured_outputs`",
        '{"structured_outputs": {"regex": "yes|no"}}',
    ),
    chat(
        "a grammar that is no regular expression",
        '{"structured_outputs": {"regex": "(yes"}}',
        "structured_outputs",
        "regex",
        '{"structured_outputs": {"regex": "(yes)"}}',
    ),
    chat(
        "a required call without tools",
        '{"tool_choice": "required"}',
        "error.*tool_choice",
        "tools",
        '{"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "search"}}], "max_tokens": 64}',
    ),
    chat(
        "a tool without its function",
        '{"tools": [{"name": "search"}]}',
        r"tools\[0\].function",
        "required",
        '{"tools": [{"type": "function", "function": {"name": "search"}}]}',
    ),
    chat(
        "tools as an object",
        '{"tools": {"name": "search"}}',
        "tools: ",
        "it must be a list",
        '{"tools": [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]}',
    ),
]

CONVERSATIONS = [
    chat(
        "no messages", '{"messages": []}', "an empty conversation", "Provide at least one message", '{"messages": HI}'
    ),
    chat(
        "a text as conversation",
        '{"messages": "hi"}',
        "messages: .*not a string",
        "a list of messages",
        '{"messages": HI}',
    ),
    chat(
        "a text as message", '{"messages": ["hi"]}', r"messages\[0\]: .*not a string", "an object", '{"messages": HI}'
    ),
    chat(
        "a message without a role",
        '{"messages": [{"content": "hi"}]}',
        r"messages\[0\].role",
        "it must be a text, such as 'user' or 'assistant'",
        '{"messages": [{"role": "user", "content": "hi"}]}',
    ),
    chat(
        "an image",
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}]}',
        r"messages\[0\].content\[0\]: it is of the type 'image_url', and this server takes text only",
        "leave it out, or describe it in words",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}',
    ),
    chat(
        "a conversation longer than the context",
        '{"messages": [{"role": "user", "content": "word " * 5000}]}',
        r"maximum context length is 1024 tokens",
        "reduce|shorten",
        '{"messages": [{"role": "user", "content": "word " * 50}]}',
    ),
    request(
        "a response in the background",
        'http.post("/v1/responses", json={"model": MODEL, "input": "hi", "background": True})',
        "background: an answer is sent to the request that waits",
        "leave out `background`",
        'http.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 4})',
    ),
    request(
        "an earlier response that does not exist",
        'http.post("/v1/responses", json={"model": MODEL, "input": "hi", "previous_response_id": "resp_1"})',
        "resp_1",
        "--ledger-max-age-days and --ledger-max-gb",
        'http.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 4})',
    ),
    request(
        "a conversation that OpenAI keeps",
        'http.post("/v1/responses", json={"model": MODEL, "input": "hi", "conversation": "conv_1"})',
        "conversations are not kept under a name",
        "send previous_response_id, or the whole conversation as `input`",
        'http.post("/v1/responses", json={"model": MODEL, "input": HI, "max_output_tokens": 4})',
    ),
    request(
        "Anthropic's request without max_tokens",
        'http.post("/v1/messages", json={"model": MODEL, "messages": HI})',
        "the request is invalid: max_tokens",
        "required",
        'http.post("/v1/messages", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
    ),
]

NAMES = [
    request(
        "no model in a request",
        'http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4})',
        "the body needs `model`",
        "'PROJECT/NAME', 'NAME' or the base model's name",
        'http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4, "model": MODEL})',
    ),
    chat(
        "a model's name is misspelt",
        '{"model": "tests/kpet"}',
        "no model 'tests/kpet'",
        "did you mean 'tests/kept'",
        "{}",
    ),
    chat(
        "a model of OpenAI",
        '{"model": "gpt-4o"}',
        "no model 'gpt-4o' here",
        "known models: .*; base model: art/tiny",
        '{"model": "art/tiny"}',
    ),
    chat(
        "a provider in place of the project",
        '{"model": "openai/kept"}',
        "no model 'openai/kept'",
        "did you mean 'tests/kept'",
        '{"model": "openai/tests/kept"}',
    ),
    chat(
        "a step that does not exist",
        '{"model": "tests/kept@99"}',
        "has no step 99",
        "kept steps: ",
        '{"model": "tests/kept@0"}',
    ),
    chat(
        "a word as step",
        '{"model": "tests/kept@first"}',
        "'first' is not a step",
        r"write tests/kept@\d+ or tests/kept@best",
        '{"model": "tests/kept@best"}',
    ),
    request(
        "a word in the header x-art-seed",
        'http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 4}, headers={"x-art-seed": "one"})',
        "x-art-seed",
        "it must be a whole number",
        'http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 4}, headers={"x-art-seed": "1"})',
    ),
    request(
        "a session's name with a space in the URL",
        'http.post("/s/my session/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
        "session.*my",
        "letters, digits",
        'http.post("/s/my-session/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
    ),
    request(
        "a wrong parameter behind the session's name",
        'http.post("/s/a;top_k=5/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
        "sampling has no 'top_k'",
        "known are temperature, top_p, max_tokens",
        'http.post("/s/a;top_p=0.5/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
    ),
]

ROUTES = [
    Use(
        "OpenAI's client without /v1",
        "openai.OpenAI(base_url=URL, api_key='x').chat.completions.create(model=MODEL, messages=HI, max_tokens=4)",
        "the base_url lacks /v1",
        r"http://127.0.0.1:\d+/v1",
        "openai.OpenAI(base_url=URL + '/v1', api_key='x').chat.completions.create(model=MODEL, messages=HI, max_tokens=4)",
        OPENAI,
    ),
    request(
        "Anthropic's base URL with /v1",
        'http.post("/v1/v1/messages", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
        "has /v1 too often",
        r"for Anthropic's client http://127.0.0.1:\d+/",
        'http.post("/v1/messages", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
    ),
    Use(
        "embeddings",
        "openai.OpenAI(base_url=URL + '/v1', api_key='x').embeddings.create(model=MODEL, input='hi')",
        "this server has no embeddings",
        "give the agent's client for them another base_url",
        "openai.OpenAI(base_url='http://127.0.0.1:9/v1', api_key='x')",
        OPENAI,
    ),
    request(
        "fine-tuning jobs of OpenAI",
        'http.post("/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": "file-1"})',
        "fine-tuning jobs of OpenAI's API",
        "`model.train` trains",
        'http.post("/api/models", json={"project": "uses", "name": "agent", "base_model": "art/tiny"})',
    ),
    request(
        "a route that does not exist",
        'http.get("/v1/engines")',
        "no such route",
        "`/openapi.json` lists the routes",
        'http.get("/openapi.json")',
    ),
    request(
        "GET of a route of POST",
        'http.get("/v1/chat/completions")',
        "this route does not answer GET",
        "use POST",
        'http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 4})',
    ),
    request(
        "a body that is no JSON",
        'http.post("/v1/chat/completions", content="model=art/tiny")',
        "the body is not JSON",
        "JSON",
        'http.post("/v1/chat/completions", content=\'{"model": "art/tiny", "messages": [{"role": "user", "content": "hi"}], '
        '"max_tokens": 4}\')',
    ),
    request(
        "a form in place of JSON",
        'http.post("/api/models", data={"project": "uses", "name": "agent", "base_model": "art/tiny"})',
        "the header content-type is not application/json",
        "application/json",
        'http.post("/api/models", json={"project": "uses", "name": "agent", "base_model": "art/tiny"})',
    ),
    request(
        "a path as a model's name",
        'http.post("/api/models", json={"project": "uses", "name": "../up", "base_model": "art/tiny"})',
        "the request is invalid: name",
        "names: use .*letters",
        'http.post("/api/models", json={"project": "uses", "name": "up", "base_model": "art/tiny"})',
    ),
    request(
        "a field that a registration does not have",
        'http.post("/api/models", json={"project": "uses", "name": "agent", "base": "art/tiny"})',
        "base: Extra inputs are not permitted",
        "base_model: Field required",
        'http.post("/api/models", json={"project": "uses", "name": "agent", "base_model": "art/tiny"})',
    ),
    request(
        "a state that jobs do not have",
        'http.get("/api/jobs", params={"state": "finished"})',
        "'finished' is not a job state",
        "use one of .*done",
        'http.get("/api/jobs", params={"state": "done"})',
    ),
    request(
        "a page of another web origin",
        'http.get("/api/jobs", headers={"origin": "https://example.com"})',
        "requests from other web origins are refused without API keys",
        "configure --api-key",
        'httpx.get(os.environ["KEYED_URL"] + "/api/jobs", headers={"origin": "https://example.com", "authorization": "Bearer all"})',
    ),
    request(
        "another name of the machine, without keys",
        'http.get("/v1/models", headers={"host": "gpu-box"})',
        "'gpu-box' is refused",
        "use localhost, or configure --api-key",
        'http.get("/v1/models", headers={"host": "localhost"})',
    ),
]

KEYS = """all
infer-only infer
expired infer,train expires=2024-01-01
theirs infer,train theirs
hosts host
"""
"""The key file of the server at KEYED_URL."""

AUTHENTICATION = [
    keyed(
        "no key",
        'http.get("/v1/models")',
        "no API key",
        "send 'Authorization: Bearer KEY'",
        'http.get("/v1/models", headers={"authorization": "Bearer all"})',
    ),
    keyed(
        "a wrong key",
        'http.get("/v1/models", headers={"authorization": "Bearer none"})',
        "unknown API key",
        "ask the server's owner for one",
        'http.get("/v1/models", headers={"authorization": "Bearer all"})',
    ),
    keyed(
        "an expired key",
        'http.get("/v1/models", headers={"authorization": "Bearer expired"})',
        "this API key expired at 2024-01-01",
        "ask the server's owner for another",
        'http.get("/v1/models", headers={"authorization": "Bearer all"})',
    ),
    keyed(
        "a key for inference that trains",
        'http.get("/api/jobs", headers={"authorization": "Bearer infer-only"})',
        "lacks the scope 'train'",
        "scope 'train'",
        'http.get("/api/jobs", headers={"authorization": "Bearer all"})',
    ),
    keyed(
        "a key of another project",
        'http.post("/api/models", json={"project": "ours", "name": "a", "base_model": "art/tiny"}, '
        'headers={"authorization": "Bearer theirs"})',
        "this key does not cover project 'ours'",
        "project",
        'http.get("/api/jobs", headers={"authorization": "Bearer theirs"})',
    ),
]

USES = [*SAMPLING, *CONVERSATIONS, *NAMES, *ROUTES, *AUTHENTICATION]
