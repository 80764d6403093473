"""Tools that the vendor of an API runs or defines: left out of a request that the model can answer without them, or refused.

Agents offer such tools with each request, whatever the model. What a vendor offers to all models (a search of the web, images) is
left out: the model answers with the agent's own tools, and the answer claims no search. A request whose only tool is such an offer
wants the tool's result, which the model would invent; it is refused. So are tools that name something of the user's (files, an MCP
server, a container), and tools that the agent runs but only the vendor's models know: without them the agent has another task.
"""

from typing import Any

import msgspec

from art_server.errors import BadRequest

OFFERS = ("web_search", "web_fetch", "tool_search", "image_generation")
"""The beginnings of the types of what vendors offer to all models. Dates and words follow: "web_search_20250305"."""
OF_AGENT = {"messages": frozenset({"custom"}), "responses": frozenset({"function", "custom", "namespace"})}
"""Types of tools that the agent defines and runs, by API. In /v1/messages a tool with an `input_schema` is such a tool, too."""
SETTINGS = 'Claude Code: --disallowedTools "WebSearch WebFetch"; Codex: web_search = "disabled"'
"""How agents turn their offers off."""


def leave_out_offers(api: str, body: dict[str, Any]) -> list[str]:
    """Removes the tools of a request that nothing here runs. Returns what they offer, of `OFFERS`.

    Raises:
        BadRequest: the request needs such a tool, or has a tool that is sampled by a grammar.
    """
    tools = body.get("tools")
    if api not in OF_AGENT or not isinstance(tools, list):
        return []
    chosen = msgspec.json.encode(body.get("tool_choice"))
    kept: list[Any] = []
    left_out: list[str] = []
    for index, tool in enumerate(tools):
        kind = vendors_kind(api, tool)
        if kind is None:
            check_format(index, tool)
            kept.append(tool)
        elif not kind.startswith(OFFERS):
            reason = "give the agent a tool of its own, with a name, a description and a schema, or leave this one out"
            raise not_run(index, f"nothing here runs or defines {kind!r}: {reason}", "type")
        elif any(msgspec.json.encode(name) in chosen for name in (kind, tool.get("name")) if name):
            raise not_run(index, f"tool_choice demands {kind!r}, which nothing here runs", "type")
        else:
            left_out.append(next(offer for offer in OFFERS if kind.startswith(offer)))
    if tools and not kept:
        raise not_run(
            0,
            f"nothing here runs {vendors_kind(api, tools[0])!r}, and the request has no other tool: give the agent a tool of its own "
            f"that does the same, or turn this one off ({SETTINGS})",
            "type",
        )
    body["tools"] = kept
    return left_out


def vendors_kind(api: str, tool: Any) -> str | None:
    """The type of a tool that the agent does not define; None for the agent's own tools."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    is_of_agent = not isinstance(kind, str) or kind in OF_AGENT[api] or (api == "messages" and "input_schema" in tool)
    return None if is_of_agent else kind


def check_format(index: int, tool: Any) -> None:
    """Checks that the agent's own tool has no grammar, which the engine would ignore."""
    form = tool.get("format") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    if isinstance(form, dict) and form.get("type") == "grammar":
        raise not_run(
            index,
            "the engine samples no custom tool by a grammar: leave out `format`, or send a function (Codex sends such a tool to "
            "models whose names it knows: give it PROJECT/NAME as `model`)",
            "format",
        )


def not_run(index: int, reason: str, member: str) -> BadRequest:
    return BadRequest(f"tools[{index}]: {reason}", code="unknown_option", param=f"tools[{index}].{member}")
