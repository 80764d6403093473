"""Reads a finetuning file: YAML 1.2, `base:`, overrides, `${VAR}` and `file://`. Every value keeps its place for the errors.

Nothing raises here. What is wrong becomes a problem of the document, so that all problems of a file come at once. `checking`
knows what the values mean.
"""

import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys, and places in lists."""

PROMPT_SUFFIXES = (".txt", ".md", ".j2", ".jinja", ".jinja2", ".prompt", ".tpl", ".template")
"""Files that a value `file://NAME` can be read from. Source: NVIDIA's toolkit."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-|\})")
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""A file of a few lines can stand for billions of values by aliases of aliases."""
SHOWN_CHARACTERS = 40
TAG = "tag:yaml.org,2002:"
VALUES = {f"{TAG}{name}" for name in ("null", "bool", "int", "float")}
TEXTS = {f"{TAG}{name}" for name in ("str", "timestamp", "merge", "value")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands. As text FILE:LINE:COLUMN, or "-o KEY"."""

    source: str
    line: int = 0
    """From 1; 0: the source has no lines."""
    column: int = 0
    folder: Path = Path()
    """What `file://` is relative to."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the remedy. As text PLACE: a.b.c: what."""

    place: Place
    path: KeyPath
    text: str

    def __str__(self) -> str:
        return ": ".join([str(self.place), *([dotted(self.path)] if self.path else []), self.text])


@dataclass(frozen=True, slots=True)
class Document:
    """A file, with overrides applied and variables expanded."""

    tree: dict[str, Any]
    places: Mapping[KeyPath, Place]
    problems: tuple[Problem, ...] = ()
    is_readable: bool = True
    """Whether `tree` has all that the files say. Otherwise only `problems` counts."""

    def place_of(self, path: KeyPath) -> Place:
        """Where a value stands; of a missing one, where the section stands that it belongs to."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]


@dataclass(slots=True)
class Node:
    """A value with its place: a scalar, or a dictionary or list of nodes."""

    value: Any  # Any: a scalar of any type
    place: Place

    @property
    def fields(self) -> "dict[str, Node] | None":
        """The nodes of a dictionary."""
        value = self.value
        return cast("dict[str, Node]", value) if isinstance(value, dict) else None

    @property
    def items(self) -> "list[Node] | None":
        """The nodes of a list."""
        value = self.value
        return cast("list[Node]", value) if isinstance(value, list) else None


@dataclass(slots=True)
class Problems:
    found: list[Problem] = field(default_factory=list[Problem])

    def add(self, place: Place, path: KeyPath, text: str) -> None:
        self.found.append(Problem(place, path, text))


def read(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a file. An override is a dotted key and its value; a text is YAML."""
    problems = Problems()
    place = Place(str(path))
    root = _load_file(path, (), place, (), problems)
    if root is None:
        return Document({}, {(): place}, tuple(problems.found), is_readable=False)
    return _document(root, overrides, problems)


def of_dict(given: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a program's dictionary. Its files are relative to the current directory."""
    problems = Problems()
    place = Place("configuration")
    root = _with_base(_node_of(given, place, (), problems), (), problems)
    if root is None:
        return Document({}, {(): place}, tuple(problems.found), is_readable=False)
    return _document(root, overrides, problems)


def _document(root: Node, overrides: Sequence[tuple[str, Any]], problems: Problems) -> Document:
    for key, text in overrides:
        _override(root, key, text, problems)
    places: dict[KeyPath, Place] = {}
    tree = _plain(root, (), places, problems)
    return Document(tree, places, tuple(problems.found))


def _plain(node: Node, path: KeyPath, places: dict[KeyPath, Place], problems: Problems) -> Any:
    """The value without nodes, with expanded texts. Fills in the places."""
    places[path] = node.place
    if node.fields is not None:
        return {key: _plain(each, (*path, key), places, problems) for key, each in node.fields.items()}
    if node.items is not None:
        return [_plain(each, (*path, number), places, problems) for number, each in enumerate(node.items)]
    if not isinstance(node.value, str):
        return node.value
    missing: list[str] = []
    text = expand(node.value, missing)
    for name in missing:
        problems.add(
            node.place,
            path,
            f"the variable {name} is not set: export it, or write a default, ${{{name}:-VALUE}}",
        )
    if not text.startswith("file://"):
        return text
    try:
        return _read_prompt(text.removeprefix("file://"), node.place.folder)
    except ValueError as error:
        problems.add(node.place, path, str(error))
        return text


def expand(text: str, missing: list[str]) -> str:
    """The text with `${VAR}` and `${VAR:-default}` replaced. A default also counts for an empty variable. Names of variables
    that are not set are added to `missing`."""
    parts: list[str] = []
    start = 0
    while found := VARIABLE.search(text, start):
        parts.append(text[start : found.start()])
        name, default, end = found[1], None, found.end()
        if found[2] == ":-":
            closing = _closing_brace(text, end)
            default, end = text[end:closing], closing + 1
        value = os.environ.get(name)
        if default is not None:
            parts.append(value or expand(default, missing))
        elif value is None:
            missing.append(name)
            parts.append(text[found.start() : end])
        else:
            parts.append(value)
        start = end
    return "".join([*parts, text[start:]])


def _closing_brace(text: str, start: int) -> int:
    """The brace that ends a default, which can contain other variables; the end of the text if there is none."""
    depth = 1
    for place in range(start, len(text)):
        if text.startswith("${", place):
            depth += 1
        elif text[place] == "}":
            depth -= 1
        if not depth:
            return place
    return len(text)


def _read_prompt(name: str, folder: Path) -> str:
    if Path(name).suffix.lower() not in PROMPT_SUFFIXES:
        raise ValueError(f"file:// reads texts, files named {' '.join(PROMPT_SUFFIXES)}, not {name!r}: rename the file")
    return read_text(folder / name)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, or is not UTF-8. The message has the absolute path.
    """
    shown = path.absolute()
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"no such file: {shown}") from None
    except IsADirectoryError:
        raise ValueError(f"{shown} is a folder: name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ValueError(f"{shown} cannot be read: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{shown} is not UTF-8 in line {line}: save it as UTF-8") from error


# --- files --------------------------------------------------------------------------------------------------------


def _load_file(path: Path, chain: tuple[Path, ...], asked: Place, key: KeyPath, problems: Problems) -> Node | None:
    """The root of a file, merged over its `base:`. None: it cannot be read, which is a problem of the place that names it."""
    if path.resolve() in chain:
        circle = " -> ".join(each.name for each in (*chain, path))
        problems.add(asked, key, f"the files name each other as base ({circle}): remove one `base`")
        return None
    try:
        text = read_text(path)
    except ValueError as error:
        problems.add(asked, key, str(error))
        return None

    def place(line: int, column: int) -> Place:
        return Place(str(path), line + 1, column + 1, path.parent)

    root, is_readable = _parse(text, (), place, problems)
    if not is_readable:
        return None
    if root is None or root.value is None:
        problems.add(place(0, 0), (), "the file is empty: docs/finetune.md has one to begin with")
        return None
    if root.fields is None:
        what = described(root.value)
        problems.add(root.place, (), f"the file is {what}: write sections, such as workflow: and finetuning:")
        return None
    return _with_base(root, (*chain, path.resolve()), problems)


def _with_base(root: Node, chain: tuple[Path, ...], problems: Problems) -> Node | None:
    base = (root.fields or {}).pop("base", None)
    if base is None:
        return root
    if not isinstance(base.value, str):
        problems.add(base.place, ("base",), f"must be the path of a YAML file, not {described(base.value)}")
        return None
    below = _load_file(base.place.folder / base.value, chain, base.place, ("base",), problems)
    return None if below is None else _merge(below, root)


def _merge(below: Node, above: Node) -> Node:
    """Both nodes' keys, deeply; `above` wins, and lists are replaced."""
    if below.fields is None or above.fields is None:
        return above
    merged = dict(below.fields)
    for key, each in above.fields.items():
        merged[key] = _merge(merged[key], each) if key in merged else each
    return Node(merged, above.place)


def _node_of(value: Any, place: Place, path: KeyPath, problems: Problems) -> Node:
    """The node of a program's value."""
    if isinstance(value, Mapping):
        fields: dict[str, Node] = {}
        for key, each in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                problems.add(place, path, f"a key must be text, not {described(key)}: put it in quotes")
            fields[str(key)] = _node_of(each, place, (*path, str(key)), problems)
        return Node(fields, place)
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return Node([_node_of(each, place, (*path, number), problems) for number, each in enumerate(items)], place)
    return Node(value, place)


# --- overrides ----------------------------------------------------------------------------------------------------


def _override(root: Node, key: str, value: Any, problems: Problems) -> None:
    """Sets a value, with all sections that it needs."""
    place = Place(f"-o {key}")
    parts = key.split(".")
    if not all(parts):
        problems.add(place, (), "not a key: write the names of the sections with dots, such as finetuning.num_epochs")
        return
    path = tuple(parts)
    if isinstance(value, str):
        new, is_readable = _parse(value, path, lambda line, column: place, problems)
        if not is_readable:
            return
    else:
        new = _node_of(value, place, path, problems)
    node = root
    for number, part in enumerate(parts[:-1]):
        inner = _child(node, part, place)
        if inner is None:
            problems.add(place, (), f"{'.'.join(parts[:number])} is {described(node.value)}: it has no part {part!r}")
            return
        node = inner
    last, made = parts[-1], new or Node(None, place)
    if node.fields is not None:
        node.fields[last] = made
    elif node.items is not None and _child(node, last, place) is not None:
        node.items[int(last)] = made
    else:
        problems.add(place, (), f"{'.'.join(parts[:-1])} is {described(node.value)}: it has no part {last!r}")


def _child(node: Node, part: str, place: Place) -> Node | None:
    """A section's part, or a list's by its number. A missing section is made."""
    if node.fields is not None:
        child = node.fields.setdefault(part, Node({}, place))
        if child.value is None:
            child.value = {}
        return child
    if node.items is not None and part.isdecimal() and int(part) < len(node.items):
        return node.items[int(part)]
    return None


# --- YAML ---------------------------------------------------------------------------------------------------------


def _parse(
    text: str, path: KeyPath, place: Callable[[int, int], Place], problems: Problems
) -> tuple[Node | None, bool]:
    """The root of a YAML text, None if it is empty, and whether it is YAML. `place` is that of a line and column from 0."""
    yaml: Any = YAML(typ="safe", pure=True)  # Any: its members have no types
    yaml.max_depth = MAX_DEPTH
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor may be used again
            root = yaml.compose(text)
    except YAMLError as error:
        where, what = _failure(error, text, place)
        problems.add(
            where, path, f"not valid YAML: {what}; look at indentation, quotes and colons here and just before"
        )
        return None, False
    if root is None:
        return None, True
    reader = _Reader(yaml.constructor, place, problems)
    return reader.node(root, path), True


def _failure(error: YAMLError, text: str, place: Callable[[int, int], Place]) -> tuple[Place, str]:
    if isinstance(error, MarkedYAMLError):
        marked = cast(Any, error)  # Any: its members have no types
        mark, context = marked.problem_mark or marked.context_mark, marked.context_mark
        what = " ".join(str(marked.problem or marked.context).split()).removeprefix("but ")
        if context and context.line != mark.line:
            what += f", for what begins in line {context.line + 1}"
        return (place(mark.line, mark.column) if mark else place(0, 0)), what
    position = int(getattr(error, "position", 0))  # of ruamel's ReaderError
    line_start = text.rfind("\n", 0, position) + 1
    where = place(text.count("\n", 0, position), position - line_start)
    return where, "a character that YAML does not allow"


class _Reader:
    """Makes nodes of ruamel's. The same node can stand at several places of the document, by aliases."""

    def __init__(self, constructor: Any, place: Callable[[int, int], Place], problems: Problems) -> None:
        self._constructor = constructor  # Any: it has no types
        self._place_of = place
        self._problems = problems
        self._open: list[int] = []
        self._num_values = 0

    def node(self, given: Any, path: KeyPath, place: Place | None = None) -> Node:
        """The node, at the place of its key, if it has one."""
        place = place or self._place(given)
        self._num_values += 1
        if id(given) in self._open:
            self._problems.add(self._place(given), path, "contains itself by an alias: write the value in full")
            return Node(None, place)
        if self._num_values > MAX_VALUES:
            if self._num_values == MAX_VALUES + 1:
                self._problems.add(place, path, f"the file has more than {MAX_VALUES} values: use fewer aliases")
            return Node(None, place)
        self._open.append(id(given))
        try:
            return Node(self._value(given, path), place)
        finally:
            self._open.pop()

    def _value(self, given: Any, path: KeyPath) -> Any:
        tag = str(given.tag)
        if _is(given, MappingNode) and tag == f"{TAG}map":
            return self._mapping(given, path)
        if _is(given, SequenceNode) and tag == f"{TAG}seq":
            return [self.node(each, (*path, number)) for number, each in enumerate(given.value)]
        if _is(given, ScalarNode) and tag in TEXTS:
            return given.value
        if _is(given, ScalarNode) and tag in VALUES:
            try:
                return self._constructor.construct_object(given)
            except (ValueError, LookupError, YAMLError):
                kind = tag.removeprefix(TAG)
                self._problems.add(self._place(given), path, f"{given.value!r} is no {kind}: put it in quotes")
                return None
        shown = tag.replace(TAG, "!!")
        self._problems.add(self._place(given), path, f"the tag {shown} is refused: write a plain value without a tag")
        return None

    def _mapping(self, given: Any, path: KeyPath) -> dict[str, Node]:
        fields: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, each in given.value:
            place = self._place(key)
            if not _is(key, ScalarNode):
                self._problems.add(place, path, "a key must be text, not a list or a mapping")
                continue
            name = str(key.value)
            if str(key.tag) == f"{TAG}merge":
                merged = {**self._merged(each, path), **merged}
            elif name in fields:
                first = fields[name].place.line
                where = f", first in line {first}" if first else ""
                self._problems.add(place, (*path, name), f"the key is repeated{where}: remove one of the two")
            else:
                fields[name] = self.node(each, (*path, name), place)
        return {**{name: each for name, each in merged.items() if name not in fields}, **fields}

    def _merged(self, given: Any, path: KeyPath) -> dict[str, Node]:
        """The keys that `<<:` takes from one mapping or from several, of which the first wins."""
        parts: list[Any] = given.value if _is(given, SequenceNode) else [given]
        merged: dict[str, Node] = {}
        for part in parts:
            fields = self.node(part, path).fields
            if fields is None:
                self._problems.add(self._place(part), path, "<<: takes a mapping or a list of mappings")
                continue
            merged = {**fields, **merged}
        return merged

    def _place(self, given: Any) -> Place:
        return self._place_of(given.start_mark.line, given.start_mark.column)


def _is(given: Any, kind: type) -> bool:
    """Whether a node is of a kind. Its members stay without types, as ruamel's have none."""
    return isinstance(given, kind)


# --- words --------------------------------------------------------------------------------------------------------


def dotted(path: KeyPath) -> str:
    """A path as people write it: a.b[0].c."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def described(value: Any) -> str:
    """What a wrong value is, in words."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        text = value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}..."
        return f"the text {text!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else f"of type {type(cast(object, value)).__name__}"


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is most like a wrong one, if one is. The likeness of equal names is 1."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"known: {', '.join(names)}" if names else "there are none"
