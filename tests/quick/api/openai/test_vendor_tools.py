"""Tools that nothing here runs: which are left out, and which are refused."""

from typing import Any

import pytest

from art_server.api.openai.vendor_tools import OFFERS, leave_out_offers
from art_server.errors import BadRequest
from tests.refusals import refused

FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
CODEX = [
    *({**FUNCTION, "name": f"f{number}"} for number in range(7)),
    {"type": "namespace", "name": "agents", "description": "Others.", "tools": [FUNCTION]},
    {"type": "web_search", "external_web_access": False},
]
"""The kinds of the nine tools of Codex 0.171."""
READ = {"name": "Read", "input_schema": {"type": "object"}}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.mark.parametrize(
    ("api", "tools", "num_kept"),
    [
        ("responses", CODEX, 8),
        ("responses", [FUNCTION, {"type": "image_generation"}, {"type": "tool_search"}], 1),
        ("responses", [FUNCTION, {"type": "custom", "name": "patch", "format": {"type": "text"}}], 2),
        ("messages", [READ, WEB, {"type": "web_fetch_20250910", "name": "web_fetch"}], 1),
        ("messages", [READ, {**READ, "type": "custom"}, {**READ, "type": "bash_20250124"}], 3),
        ("chat", [{"type": "web_search"}], 1),
    ],
)
@pytest.mark.parametrize("choice", [None, "auto", {"type": "any"}])
def test_offers_of_vendors_are_left_out(api: str, tools: list[Any], num_kept: int, choice: Any) -> None:
    body = {"tools": [*tools], "tool_choice": choice}
    left_out = leave_out_offers(api, body)
    assert len(left_out) == len(tools) - num_kept and set(left_out) <= set(OFFERS)
    assert body["tools"] == [tool for tool in tools if tool in body["tools"]] and len(body["tools"]) == num_kept


def test_a_request_without_tools_is_unchanged() -> None:
    for body in ({}, {"tools": None}, {"tools": []}, {"tools": "x"}):
        before = dict(body)
        leave_out_offers("messages", body)
        assert body == before


@pytest.mark.parametrize(
    ("api", "tools", "choice", "words"),
    [
        ("messages", [WEB], None, 'and the request has no other tool: .*--disallowedTools "WebSearch'),
        ("responses", [{"type": "web_search"}], "auto", 'Codex: web_search = "disabled"'),
        ("messages", [WEB, READ], {"type": "tool", "name": "web_search"}, "tool_choice demands 'web_search_20250305'"),
        ("responses", [{"type": "web_search"}, FUNCTION], {"type": "web_search"}, "tool_choice demands 'web_search'"),
        ("messages", [{"type": "bash_20250124", "name": "bash"}, READ], None, "a tool of its own, with a name"),
        ("responses", [{"type": "local_shell"}, FUNCTION], None, "nothing here runs or defines 'local_shell'"),
    ],
)
def test_a_request_that_needs_a_vendor_s_tool_is_refused(api: str, tools: list[Any], choice: Any, words: str) -> None:
    with refused(BadRequest, "unknown_option", "tools[0].type") as error:
        leave_out_offers(api, {"tools": tools, "tool_choice": choice})
    error.match(words)


@pytest.mark.parametrize("kind", ["file_search", "code_interpreter", "mcp", "code_execution_20250825", "mcp_toolset"])
def test_tools_that_name_something_of_the_user_are_refused(kind: str) -> None:
    for api in ("messages", "responses"):
        with refused(BadRequest, "unknown_option", "tools[1].type"):
            leave_out_offers(api, {"tools": [{**READ, **FUNCTION}, {"type": kind}]})


def test_a_tool_with_a_grammar_is_refused_in_a_sentence_that_names_codex() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [FUNCTION, {"type": "custom", "name": "apply_patch", "format": form}]
    with refused(BadRequest, "unknown_option", "tools[1].format") as error:
        leave_out_offers("responses", {"tools": tools})
    error.match("no custom tool by a grammar: .*Codex")
