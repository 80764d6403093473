"""`art show`: rollouts as people read them. Tokens can be coloured by a number of the trainer or the sampler."""

import json
import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from art_server.terminal.sources import Row
from art_server.terminal.tables import beginning, make_table, plain, say
from art_server.terminal.text import number, visible

ROLES = {"user": "cyan", "assistant": "green", "tool": "yellow", "system": "bright_black"}
MARKS = ("", "black on bright_yellow", "black on orange1", "white on red")
"""Of a token, by the number of bounds that it passes."""
BOUNDS = {"logprob": (-0.7, -2.3, -4.6), "gap": (0.01, 0.1, 0.5), "ratio": (0.05, 0.2, 0.5)}
"""logprob: probabilities of 0.5, 0.1 and 0.01. gap: of either sign. ratio: the distance of its logarithm from 0."""
Tokens = list[tuple[str, float | None]]


def print_show(console: Console, document: Row, tokens: str | None) -> None:
    """Prints groups as tables or, where the document has rollouts, these in full."""
    console.print(
        plain(f"{document['model']}, step {document['step']}, {document['split']}", "bold")
    )
    if not document["groups"]:
        console.print("no rollouts")
    if tokens is not None and has_colour(console):
        console.print(_legend(tokens))
    for group in document["groups"]:
        _print_group(console, group, is_table="rollouts" not in document)
    for rollout in document.get("rollouts", ()):
        _print_rollout(console, rollout, tokens)


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _print_group(console: Console, group: Row, *, is_table: bool) -> None:
    parts = [f"group {group['index']}"]
    if group["mean"] is not None:
        parts += [f"mean {number(group['mean'])}", f"deviation {number(group['std'])}"]
    parts += ["no signal"] if group["is_dead"] else []
    parts += ["its line in the file cannot be read"] if group.get("is_unreadable") else []
    console.print()
    console.print(plain(", ".join(parts), "bold"))
    for failure in group["failures"]:
        say(console, plain(f"failed: {failure.get('type')}: {failure.get('message')}", "red"))
    _print_details(console, group)
    if not is_table:
        return
    table = make_table("#", "reward", "turns", "tokens", "end", "origin", "text")
    for each in group["rollouts"]:
        dropped = f" {each['num_dropped']} dropped" if each["num_dropped"] else ""
        table.add_row(
            plain(each["index"]),
            plain(number(each["reward"])),
            plain(each["num_turns"]),
            plain(each["num_tokens"] or ""),
            plain(each["finish_reason"] or ""),
            plain(",".join(each["origins"]) + dropped, "red" if dropped else ""),
            beginning(each["text"]),
        )
    console.print(table)


def _print_details(console: Console, row: Row) -> None:
    """The metrics, metadata and logs of a group or a rollout."""
    for name in ("metrics", "metadata", "logs"):
        if row[name]:
            text = json.dumps(row[name], ensure_ascii=False)
            say(console, plain(f"{name}: {text}", "bright_black"))


def _print_rollout(console: Console, rollout: Row, tokens: str | None) -> None:
    title = f"rollout {rollout['index']} of group {rollout['group']}, reward {number(rollout['reward'])}"
    console.print()
    console.print(plain(title, "bold"))
    _print_details(console, rollout)
    if tokens not in (None, "logprob") and not rollout["has_token_record"]:
        console.print(plain(f"no {tokens} is known: the step has no record of tokens", "yellow"))
    for place, history in enumerate(rollout["histories"]):
        if place:
            console.print(plain(f"conversation {place + 1}", "bold"))
        for entry in history["entries"]:
            _print_entry(console, rollout, entry, tokens)


def _print_entry(console: Console, rollout: Row, entry: Row, tokens: str | None) -> None:
    found = [] if tokens is None else tokens_of(rollout, entry, tokens)
    body = Text("\n").join(_body(console, entry, tokens or "", found))
    names = [entry["role"], entry["name"], entry["tool_call_id"]]
    title = plain(" ".join(str(name) for name in names if name))
    note, style = _note(entry)
    if not console.is_terminal:
        say(console, Text.assemble("\n--- ", title, f" ({note})" if note else ""))
        say(console, body)
        return
    colour = ROLES.get(entry["role"], "white")
    panel = Panel(body, title=title, title_align="left", border_style=colour)
    panel.subtitle, panel.subtitle_align = Text(note, style), "left"
    console.print(panel)


def _body(console: Console, entry: Row, name: str, tokens: Tokens) -> Iterable[Text]:
    """What a message says: its thinking, its text or tokens, and its tool calls."""
    if entry["reasoning"] and not tokens:
        yield plain(entry["reasoning"], "italic bright_black")
    if tokens:
        yield Text.assemble(*(_token(console, name, *each) for each in tokens))
    elif entry["text"]:
        yield plain(entry["text"])
    for call in entry["tool_calls"]:
        yield plain(f"→ {call['name']}({call['arguments']})", "magenta")


def _note(entry: Row) -> tuple[str, str]:
    """Where a turn's tokens come from or why they are not trained, and the style of this note."""
    turn, parts = entry["turn"] or {}, []
    if entry["finish_reason"] is not None:
        parts.append(str(entry["finish_reason"]))
    if "origin" in turn:
        parts += [f"tokens from {turn['origin']}", f"{turn['stop'] - turn['start']} tokens"]
    if "step" in turn:
        parts.append(f"sampled by step {turn['step']}")
    if "continues" in turn:
        parts.append(turn["continues"])
    if "dropped" in turn:
        parts.append(f"not trained: {turn['dropped']}")
    return visible(", ".join(parts)), "red" if "dropped" in turn else "bright_black"


def tokens_of(rollout: Row, entry: Row, name: str) -> Tokens:
    """A turn's sampled tokens, each with its number; empty if neither the record nor the choice has them."""
    turn = entry["turn"] or {}
    sequences = rollout["sequences"]
    if "sequence" in turn and turn["sequence"] < len(sequences):
        sequence = sequences[turn["sequence"]]
        span = slice(turn["start"], turn["stop"])
        return list(zip(sequence["texts"][span], _numbers(sequence, name)[span], strict=True))
    return (
        [(text, value) for text, value in entry.get("logprobs") or ()] if name == "logprob" else []
    )


def _numbers(sequence: Row, name: str) -> Sequence[float | None]:
    sampled, trained = sequence["sampled_logprobs"], sequence["trainer_logprobs"]
    if name == "gap":
        return [
            None if one is None or other is None else other - one
            for one, other in zip(sampled, trained, strict=True)
        ]
    return {"logprob": sampled, "ratio": sequence["ratios"], "advantage": sequence["advantages"]}[
        name
    ]


def _token(console: Console, name: str, text: str, value: float | None) -> Text:
    """A token in the colour of its number; without colours, with the number behind it."""
    if value is None or has_colour(console):
        return plain(text, "" if value is None else mark(name, value))
    return plain(f"{text}‹{value:.3g}›")


def mark(name: str, value: float) -> str:
    """The style of a token."""
    if name == "advantage":
        return "black on green" if value > 0 else "white on red" if value < 0 else ""
    if name == "logprob":
        return MARKS[sum(value < bound for bound in BOUNDS[name])]
    if name == "ratio":
        value = math.log(value) if value > 0 else math.inf
    return MARKS[sum(abs(value) > bound for bound in BOUNDS[name])]


def _legend(name: str) -> Text:
    if name == "advantage":
        parts = [("above 0", "black on green"), ("below 0", "white on red")]
    else:
        sign = {"logprob": "below", "gap": "over ±", "ratio": "log over ±"}[name]
        parts = [
            (f"{sign}{' ' if name == 'logprob' else ''}{bound}", style)
            for bound, style in zip(BOUNDS[name], MARKS[1:], strict=True)
        ]
    return Text.assemble(f"{name}:", *(part for each in parts for part in (" ", each)))
