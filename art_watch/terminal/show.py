"""`art show`: rollouts as people read them."""

import json
from collections.abc import Iterable
from itertools import starmap

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from art_watch.terminal.sources import Row
from art_watch.terminal.tables import beginning, make_table, plain, say
from art_watch.terminal.text import number, visible

ROLES = {"user": "cyan", "assistant": "green", "tool": "yellow", "system": "bright_black"}


def print_show(console: Console, document: Row) -> None:
    """Prints groups as tables. If the document has rollouts, prints the rollouts in full instead of the tables."""
    console.print(plain(f"{document['model']}, step {document['step']}, {document['split']}", "bold"))
    if not document["groups"]:
        console.print("no rollouts")
    for group in document["groups"]:
        _print_group(console, group, is_table="rollouts" not in document)
    for rollout in document.get("rollouts", ()):
        _print_rollout(console, rollout)


def _print_group(console: Console, group: Row, *, is_table: bool) -> None:
    parts = [f"group {group['index']}"]
    if group["mean"] is not None:
        parts += [f"mean {number(group['mean'])}", f"deviation {number(group['std'])}"]
    if group["is_dead"]:
        parts.append("no signal")
    if group.get("is_unreadable"):
        parts.append("its line in the file cannot be read")
    console.print()
    console.print(plain(", ".join(parts), "bold"))
    if is_table and group["prompt"]:
        console.print(beginning(group["prompt"]))
    for failure in group["failures"]:
        say(console, plain(f"failed: {failure.get('type')}: {failure.get('message')}", "red"))
    _print_details(console, group)
    if not is_table:
        return
    has_metrics = any(rollout["metrics"] for rollout in group["rollouts"])
    names = ["#", "reward", "turns", "tokens", "end", "origin", *(["metrics"] if has_metrics else []), "text"]
    table = make_table(*names)
    for rollout in group["rollouts"]:
        dropped = f" {rollout['num_dropped']} dropped" if rollout["num_dropped"] else ""
        table.add_row(
            plain(rollout["index"]),
            plain(number(rollout["reward"])),
            plain(rollout["num_turns"]),
            plain(rollout["num_tokens"] or ""),
            plain(rollout["finish_reason"] or ""),
            plain(",".join(rollout["origins"]) + dropped, "red" if dropped else ""),
            *([plain(" ".join(starmap(_metric, rollout["metrics"].items())))] if has_metrics else []),
            beginning(rollout["text"]),
        )
    console.print(table)


def _metric(name: str, value: object) -> str:
    return f"{name}={value:.3g}" if isinstance(value, int | float) else f"{name}={value}"


def _print_details(console: Console, row: Row) -> None:
    """The metrics, metadata and logs of a group or a rollout."""
    for name in ("metrics", "metadata", "logs"):
        if row[name]:
            text = json.dumps(row[name], ensure_ascii=False)
            say(console, plain(f"{name}: {text}", "bright_black"))


def _print_scores(console: Console, scores: Iterable[Row]) -> None:
    """The scores of a rollout or a session: what was scored, by whom, and what became of the score."""
    for score in scores:
        state = score["state"] if score["reason"] is None else f"{score['state']}: {score['reason']}"
        trained = "" if score["trained_step"] is None else f" step {score['trained_step']}"
        user = "" if score["user"] is None else f" by {score['user']}"
        comment = "" if score["comment"] is None else f": {score['comment']}"
        say(console, plain(f"score {score['name']} {number(score['value'])}{user}, {state}{trained}{comment}", "cyan"))


def print_session(console: Console, document: Row) -> None:
    """Prints the conversations of a session in full."""
    _print_conversations(console, document, f"{document['model']}, session {document['session']}")


def _print_rollout(console: Console, rollout: Row) -> None:
    title = f"rollout {rollout['index']} of group {rollout['group']}, reward {number(rollout['reward'])}"
    _print_conversations(console, rollout, title)


def _print_conversations(console: Console, rollout: Row, title: str) -> None:
    console.print()
    console.print(plain(title, "bold"))
    _print_details(console, rollout)
    _print_scores(console, rollout["scores"])
    for index, history in enumerate(rollout["histories"]):
        if index:
            console.print(plain(f"conversation {index + 1}", "bold"))
        for tool in history["tools"] or ():
            say(console, plain(f"tool: {json.dumps(tool, ensure_ascii=False)}", "bright_black"))
        for entry in history["entries"]:
            _print_entry(console, entry)


def _print_entry(console: Console, entry: Row) -> None:
    body = Text("\n").join(_body(entry))
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


def _body(entry: Row) -> Iterable[Text]:
    """The thinking, the text and the tool calls of a message, and why the message does not continue the earlier turns."""
    if entry["reasoning"]:
        yield plain(entry["reasoning"], "italic bright_black")
    if entry["text"]:
        yield plain(entry["text"])
    for call in entry["tool_calls"]:
        yield plain(f"→ {call['name']}({call['arguments']})", "magenta")
    if difference := (entry["turn"] or {}).get("difference"):
        yield plain(f"[a new sequence: {difference}]", "red")


def _note(entry: Row) -> tuple[str, str]:
    """What the request demanded, where a turn's tokens come from or why they are not trained, and the style of this note."""
    turn, parts = entry["turn"] or {}, []
    if entry["finish_reason"] is not None:
        parts.append(str(entry["finish_reason"]))
    for name in ("tool_choice", "format"):
        if demand := (entry.get("sampled_by") or {}).get(name):
            parts.append(f"{name} {demand if isinstance(demand, str) else json.dumps(demand, ensure_ascii=False)}")
    if "origin" in turn:
        parts += [f"tokens from {turn['origin']}", f"{turn['stop'] - turn['start']} tokens"]
    if "step" in turn:
        parts.append(f"sampled by step {turn['step']}")
    if "continues" in turn:
        parts.append(turn["continues"])
    if "dropped" in turn:
        parts.append(f"not trained: {turn['dropped']}")
    return visible(", ".join(parts)), "red" if "dropped" in turn else "bright_black"
