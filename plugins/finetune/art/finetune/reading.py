"""Reads a finetuning file: YAML 1.2, `base:`, overrides, `${VAR}` and `file://`. Every value keeps its place for the errors.

What is wrong becomes a problem of the document, so that all problems of a file come at once. `checking` knows what the values
mean.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode, SequenceNode

from art.finetune.errors import WrongInput

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys, and places in lists."""

PROMPT_SUFFIXES = (".txt", ".md", ".j2", ".jinja", ".jinja2", ".prompt", ".tpl", ".template")
"""Files that a value `file://NAME` can be read from. Source: NVIDIA's toolkit."""
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-((?:[^{}]|\{[^{}]*\})*))?\}")
"""`${VAR}` or `${VAR:-default}`. A default can contain another variable."""
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""A file of a few lines can stand for billions of values by aliases of aliases."""
SHOWN_CHARACTERS = 40
TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Quoted(str):
    """A text in quotes, whose variables stand for texts."""


class Expanded(str):
    """A text without quotes that had a variable. Which type it stands for, its field decides, or else `typed`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands. As text FILE:LINE:COLUMN, or "-o KEY"."""

    source: str
    line: int = 0
    """From 1; 0: the source has no lines."""
    column: int = 0
    folder: Path = Path()
    """What `file://` and `base:` are relative to."""

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
    """A file, merged over its `base:`."""

    tree: Any
    """Dictionaries, lists and plain values."""
    places: dict[KeyPath, Place]
    problems: list[Problem] = field(default_factory=list[Problem])

    def place_of(self, path: KeyPath) -> Place:
        """Where a value stands; of a missing one, where the section stands that it belongs to."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]


def read(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a file. An override is a dotted key and its value; a text is YAML.

    Raises:
        WrongInput: a file cannot be read, or is not YAML.
    """
    return _completed(_load(path, Place(str(path)), (), ()), overrides)


def of_dict(given: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a program's dictionary. Its files are relative to the current directory.

    Raises:
        WrongInput: a file cannot be read, or is not YAML.
    """
    return _completed(_with_base(Document(given, _places(given, Place("configuration"))), ()), overrides)


def _places(value: Any, place: Place, path: KeyPath = ()) -> dict[KeyPath, Place]:
    """The same place for a section and all that is in it."""
    found = {path: place}
    if isinstance(value, Mapping):
        for key, each in cast("Mapping[Any, Any]", value).items():
            found |= _places(each, place, (*path, str(key)))
    return found


# --- files --------------------------------------------------------------------------------------------------------


def _load(path: Path, asked: Place, key: KeyPath, chain: tuple[Path, ...]) -> Document:
    """A file, merged over its `base:`. `asked` and `key` are the place that names it, `chain` the files above it."""
    if path.resolve() in chain:
        circle = " -> ".join(each.name for each in (*chain, path))
        raise _wrong(asked, key, f"the files name each other as base ({circle}): remove one `base`")
    try:
        text = read_text(path)
    except ValueError as error:
        raise _wrong(asked, key, str(error)) from error
    reader = _Reader(lambda line, column: Place(str(path), line + 1, column + 1, path.parent))
    document = reader.document(text)
    if not isinstance(document.tree, dict):
        what = described(cast(object, document.tree))
        text = f"the file is {what}: write sections, such as workflow: and finetuning: (docs/finetune.md)"
        raise _wrong(document.place_of(()), (), text)
    return _with_base(document, (*chain, path.resolve()))


def _with_base(document: Document, chain: tuple[Path, ...]) -> Document:
    tree = dict(document.tree)
    if "base" not in tree:
        return document
    base, place = tree.pop("base"), document.place_of(("base",))
    if not isinstance(base, str):
        raise _wrong(place, ("base",), f"must be the path of a YAML file, not {described(base)}")
    below = _load(place.folder / base, place, ("base",), chain)
    return Document(
        _merge(below.tree, tree), {**below.places, **document.places}, [*below.problems, *document.problems]
    )


def _merge(below: Any, above: Any) -> Any:
    """Both values' keys, deeply; `above` wins, and lists are replaced."""
    if not isinstance(below, dict) or not isinstance(above, Mapping):
        return above
    merged = dict(cast("dict[str, Any]", below))
    for key, value in cast("Mapping[str, Any]", above).items():
        merged[key] = _merge(merged.get(key), value)
    return merged


def _wrong(place: Place, path: KeyPath, text: str) -> WrongInput:
    return WrongInput([str(Problem(place, path, text))])


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, or is not UTF-8. The message has the absolute path.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path.absolute()} is not UTF-8 in line {line}: save it as UTF-8") from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        ValueError: it cannot be read. The message has the absolute path.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"no such file: {path.absolute()}") from error
    except OSError as error:
        raise ValueError(f"{path.absolute()} cannot be read: {error.strerror}") from error


# --- overrides and texts --------------------------------------------------------------------------------------------


def _completed(document: Document, overrides: Sequence[tuple[str, Any]]) -> Document:
    """The document with overrides, and with expanded texts. Only values that are there have a place."""
    for key, value in overrides:
        document = _override(document, key, value)
    places: dict[KeyPath, Place] = {}
    problems = list(document.problems)

    def complete(value: Any, path: KeyPath) -> Any:
        place = places[path] = document.place_of(path)
        if isinstance(value, Mapping):
            fields = cast("Mapping[Any, Any]", value).items()
            return {str(key): complete(each, (*path, str(key))) for key, each in fields}
        if isinstance(value, list | tuple):
            return [complete(each, (*path, number)) for number, each in enumerate(cast("Sequence[Any]", value))]
        return _expanded(value, place, path, problems) if isinstance(value, str) else value

    return Document(complete(document.tree, ()), places, problems)


def _override(document: Document, key: str, value: Any) -> Document:
    place, path = Place(f"-o {key}"), tuple(key.split("."))
    problems = list(document.problems)
    if isinstance(value, str):
        given = _Reader(lambda line, column: place, path).document(value)
        value, problems = given.tree, [*problems, *given.problems]
    try:
        tree = _replaced(document.tree, path, value)
    except ValueError as error:
        return Document(document.tree, document.places, [*problems, Problem(place, (), str(error))])
    places = {each: known for each, known in document.places.items() if each[: len(path)] != path}
    return Document(tree, {**places, path: place}, problems)


def _replaced(tree: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a section in which a value is set, with all sections that it needs."""
    if not path:
        return value
    if not path[0] or not isinstance(tree, Mapping | None):
        raise ValueError(f"{described(tree)} has no part {path[0]!r}: write the names of sections, such as a.b.c")
    fields = dict(cast("Mapping[str, Any]", tree or {}))
    return fields | {path[0]: _replaced(fields.get(path[0]), path[1:], value)}


def _expanded(text: str, place: Place, path: KeyPath, problems: list[Problem]) -> str:
    """A text with its variables, or that of the prompt which it names."""
    missing: list[str] = []
    given, text = text, expand(text, missing)
    for name in missing:
        wrong = f"the variable {name} is not set: export it, or write a default, ${{{name}:-VALUE}}"
        problems.append(Problem(place, path, wrong))
    if not text.startswith("file://"):
        is_plain = text == given or isinstance(given, Quoted)
        return str(text) if is_plain else Expanded(text)
    file = place.folder / text.removeprefix("file://")
    try:
        if file.suffix.lower() not in PROMPT_SUFFIXES:
            raise ValueError(f"file:// reads texts, files named {' '.join(PROMPT_SUFFIXES)}: rename the file")
        return read_text(file)
    except ValueError as error:
        problems.append(Problem(place, path, str(error)))
        return text


def typed(value: Any) -> Any:
    """A value in which texts that had variables are the numbers and booleans that YAML takes them for."""
    if isinstance(value, Mapping):
        return {name: typed(field) for name, field in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [typed(entry) for entry in cast("list[Any]", value)]
    if not isinstance(value, Expanded):
        return value
    with contextlib.suppress(YAMLError, ValueError):
        reader: Any = YAML(typ="safe", pure=True)  # Any: its members have no types
        number: Any = reader.load(str(value))
        if isinstance(number, bool | int | float):
            return number
    return str(value)


def expand(text: str, missing: list[str]) -> str:
    """The text with `${VAR}` and `${VAR:-default}` replaced. A default also counts for an empty variable. Names of variables
    that are not set are added to `missing`."""

    def value_of(found: re.Match[str]) -> str:
        name, default = found.groups()
        value = os.environ.get(name)
        if default is not None:
            return value or expand(default, missing)
        if value is None:
            missing.append(name)
        return value or ""

    return VARIABLE.sub(value_of, text)


# --- YAML ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Makes plain values of YAML. An alias becomes a copy, and the first of repeated keys counts."""

    def __init__(self, place: Callable[[int, int], Place], path: KeyPath = ()) -> None:
        self._place = place  # that of a line and a column, from 0
        self._path = path
        self._yaml: Any = YAML(typ="safe", pure=True)  # Any: its members have no types
        self._yaml.max_depth = MAX_DEPTH
        self._document = Document(None, {path: place(0, 0)})

    def document(self, text: str) -> Document:
        """The document of a text.

        Raises:
            WrongInput: it is not YAML.
        """
        try:
            root = self._yaml.compose(text)
            tree = None if root is None else self._value(root, self._path)
        except (YAMLError, ValueError, LookupError, RecursionError) as error:
            place, what = self._failure(error)
            what = f"not valid YAML: {what}; look at indentation, quotes and colons here and just before"
            raise _wrong(place, self._path, what) from error
        return Document(tree, self._document.places, self._document.problems)

    def _value(self, node: Any, path: KeyPath) -> Any:
        self._document.places.setdefault(path, self._place(node.start_mark.line, node.start_mark.column))
        if len(path) > MAX_DEPTH or len(self._document.places) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, or a value that contains itself: use fewer aliases")
        if _is(node, ScalarNode):
            if node.tag not in TEXT_TAGS:
                return self._yaml.constructor.construct_object(node)
            return Quoted(node.value) if node.style else node.value  # also a date stays a text
        if node.tag not in COLLECTION_TAGS:
            self._yaml.constructor.construct_undefined(node)
        if _is(node, SequenceNode):
            return [self._value(each, (*path, number)) for number, each in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        lines: dict[str, int] = {}
        self._yaml.constructor.flatten_mapping(node)  # what `<<:` takes comes first
        num_merged = len(node.merge or ())
        for number, (key, value) in enumerate(node.value):
            name = self._yaml.constructor.construct_scalar(key)
            place, here = self._place(key.start_mark.line, key.start_mark.column), (*path, name)
            if name in lines:
                wrong = f"the key is repeated, first in line {lines[name]}: remove one of the two"
                self._document.problems.append(Problem(place, here, wrong))
                continue
            if number >= num_merged:
                lines[name] = place.line
            self._document.places[here] = place
            fields[name] = self._value(value, here)
        return fields

    def _failure(self, error: Exception) -> tuple[Place, str]:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if mark is None:
            return self._place(0, 0), str(error).partition("\n")[0]
        what = str(getattr(error, "problem", None) or getattr(error, "context", None)).removeprefix("but ")
        begun: Any = getattr(error, "context_mark", None)
        if begun and begun.line != mark.line:
            what += f", for what begins in line {begun.line + 1}"
        return self._place(mark.line, mark.column), " ".join(what.split())


def _is(node: Any, kind: type) -> bool:
    """Whether a node is of a kind. Its members stay without types, as ruamel's have none."""
    return isinstance(node, kind)


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
