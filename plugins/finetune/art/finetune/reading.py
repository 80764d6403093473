"""Reads a finetuning file: YAML 1.2, `base:`, overrides, `${VAR}` and `file://`. Every value keeps its location for the errors.

A fault becomes a problem of the document, so that all problems of a file come at once. `checking` knows the meaning of values.
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

from art.finetune.errors import WrongInput

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and the list indices that lead to a value: `("a", "b", 0)`."""

PROMPT_SUFFIXES = (".txt", ".md", ".j2", ".jinja", ".jinja2", ".prompt", ".tpl", ".template")
"""The endings of files that a value `file://NAME` can name. Source: NVIDIA's toolkit."""
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-((?:[^{}]|\{[^{}]*\})*))?\}")
"""`${VAR}` or `${VAR:-default}`. A default can contain another variable."""
OF_HUB = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<subset>[^/:]+))?(?::(?P<split>.+))?")
"""A data set of the hub as one text: hub:OWNER/NAME, with /SUBSET and :SPLIT."""
DATASET_ENDINGS = ("json", "jsonl", "csv", "tsv", "parquet")
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""A file of a few lines can stand for billions of values by aliases of aliases."""
SHOWN_CHARACTERS = 40
TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Quoted(str):
    """A text in quotes. The values of its variables stay texts."""


class Expanded(str):
    """A text without quotes that had a variable: `${N}` may be a number. The field's declared type decides, or else `typed`."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a value is written. As text: FILE:LINE:COLUMN, or "-o KEY"."""

    source: str
    line: int = 0
    """From 1; 0: the source has no lines."""
    column: int = 0
    folder: Path = Path()
    """The folder that `file://` and `base:` are relative to."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault, and its remedy. As text: LOCATION: a.b.c: TEXT."""

    location: Location
    path: KeyPath
    text: str

    def __str__(self) -> str:
        name = dotted(self.path)
        if not name or self.location.source == f"-o {name}":
            return f"{self.location}: {self.text}"
        return f"{self.location}: {name}: {self.text}"


@dataclass(frozen=True, slots=True)
class Document:
    """A file, merged over its `base:`."""

    tree: Any
    """Dictionaries, lists and plain values."""
    locations: dict[KeyPath, Location]
    problems: list[Problem] = field(default_factory=list[Problem])

    def location_of(self, path: KeyPath) -> Location:
        """The location of a value. A missing value has the location of the innermost section around the value."""
        while path and path not in self.locations:
            path = path[:-1]
        return self.locations[path]

    def problem(self, path: KeyPath, text: str) -> Problem:
        """A fault of a value."""
        return Problem(self.location_of(path), path, text)


def read(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a file. An override is a dotted key and a value. A value that is a text is read as YAML.

    Raises:
        WrongInput: a file cannot be read, or is not YAML.
    """
    return _completed(_load(path, Location(str(path)), (), ()), overrides)


def of_dict(tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = ()) -> Document:
    """The document of a program's dictionary. Files that the dictionary names are relative to the current directory.

    Raises:
        WrongInput: a file cannot be read, or is not YAML.
    """
    return _completed(_with_base(Document(tree, _locations(tree, Location("configuration"))), ()), overrides)


def _locations(value: Any, location: Location, path: KeyPath = ()) -> dict[KeyPath, Location]:
    """The same location for a section and for all values in the section."""
    locations = {path: location}
    if isinstance(value, Mapping):
        for key, entry in cast("Mapping[Any, Any]", value).items():
            locations |= _locations(entry, location, (*path, str(key)))
    return locations


# --- files --------------------------------------------------------------------------------------------------------


def _load(path: Path, origin: Location, key: KeyPath, chain: tuple[Path, ...]) -> Document:
    """A file, merged over its `base:`. `origin` and `key` say where the file is named; `chain` has the files that led to the
    file."""
    if path.resolve() in chain:
        circle = " -> ".join(file.name for file in (*chain, path))
        raise _wrong(origin, key, f"the files name each other as base ({circle}): remove one `base`")
    try:
        text = read_text(path)
    except ValueError as error:
        raise _wrong(origin, key, str(error)) from error
    reader = _Reader(lambda line, column: Location(str(path), line + 1, column + 1, path.parent))
    document = reader.document(text)
    if not isinstance(document.tree, dict):
        what = described(cast(object, document.tree))
        text = f"the file is {what}: write sections, such as workflow: and finetuning: (docs/finetune.md)"
        raise _wrong(document.location_of(()), (), text)
    return _with_base(document, (*chain, path.resolve()))


def _with_base(document: Document, chain: tuple[Path, ...]) -> Document:
    tree = dict(document.tree)
    if "base" not in tree:
        return document
    base, location = tree.pop("base"), document.location_of(("base",))
    if not isinstance(base, str):
        raise _wrong(location, ("base",), f"must be the path of a YAML file, not {described(base)}")
    below = _load(location.folder / base, location, ("base",), chain)
    return Document(
        _merge(below.tree, tree), {**below.locations, **document.locations}, [*below.problems, *document.problems]
    )


def _merge(below: Any, above: Any) -> Any:
    """The keys of both values, merged deeply. `above` wins, and a list in `above` replaces the list in `below`."""
    if not isinstance(below, dict) or not isinstance(above, Mapping):
        return above
    merged = dict(cast("dict[str, Any]", below))
    for key, value in cast("Mapping[str, Any]", above).items():
        merged[key] = _merge(merged.get(key), value)
    return merged


def _wrong(location: Location, path: KeyPath, text: str) -> WrongInput:
    return WrongInput([str(Problem(location, path, text))])


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8. The message has the absolute path.
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
        ValueError: the file cannot be read. The message has the absolute path.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise no_such_file(path) from error
    except OSError as error:
        raise ValueError(f"{path.absolute()} cannot be read: {error.strerror}") from error


def no_such_file(path: Path) -> ValueError:
    """The error for a file that does not exist, with the file that was meant."""
    path = path.absolute()
    near = nearest(path.name, [file.name for file in path.parent.glob("*") if file.is_file()])
    return ValueError(f"no such file: {path}; " + (f"did you mean {near!r}?" if near else "check the path"))


# --- overrides and texts --------------------------------------------------------------------------------------------


def _completed(document: Document, overrides: Sequence[tuple[str, Any]]) -> Document:
    """The document with overrides, and with expanded texts."""
    for key, value in overrides:
        document = _override(document, key, value)
    problems = list(document.problems)

    def complete(value: Any, path: KeyPath) -> Any:
        if isinstance(value, Mapping):
            fields = cast("Mapping[Any, Any]", value).items()
            return {str(key): complete(entry, (*path, str(key))) for key, entry in fields}
        if isinstance(value, list | tuple):
            return [complete(entry, (*path, index)) for index, entry in enumerate(cast("Sequence[Any]", value))]
        return _expanded(value, document.location_of(path), path, problems) if isinstance(value, str) else value

    return Document(complete(document.tree, ()), document.locations, problems)


def _override(document: Document, key: str, value: Any) -> Document:
    location, path = Location(f"-o {key}"), tuple(key.split("."))
    problems = list(document.problems)
    if isinstance(value, str):
        parsed = _Reader(lambda line, column: location, path).document(value)
        value, problems = parsed.tree, [*problems, *parsed.problems]
    try:
        tree = _replaced(document.tree, path, value)
    except ValueError as error:
        return Document(document.tree, document.locations, [*problems, Problem(location, (), str(error))])
    locations = {
        known_path: known for known_path, known in document.locations.items() if known_path[: len(path)] != path
    }
    return Document(tree, {**locations, path: location}, problems)


def dataset_of_text(value: Any) -> Any:
    """The section of a data set that is only a path, or an id of the hub as "hub:OWNER/NAME[/SUBSET][:SPLIT]":
    `"a.CSV" -> {"_type": "csv", "file_path": "a.CSV"}`. A file that ends with .tsv is a csv file with tabs."""
    if not isinstance(value, str | Path):
        return value
    if match := OF_HUB.fullmatch(str(value)):
        return {"_type": "hub"} | {name: text for name, text in match.groupdict().items() if text is not None}
    ending = Path(value).suffix.removeprefix(".").lower()
    if ending == "tsv":
        return {"_type": "csv", "file_path": value, "delimiter": "\t"}
    return {"_type": ending, "file_path": value}


def dataset_of_file(value: Any) -> Any:
    """As `dataset_of_text`.

    Raises:
        ValueError: the text names no file of a known kind.
    """
    section = dataset_of_text(value)
    if section is value or section["_type"] in ("hub", *DATASET_ENDINGS):
        return section
    if not Path(value).exists():
        raise ValueError(f"no such file: {Path(value).absolute()}")
    raise ValueError(f"name a file that ends with .{', .'.join(DATASET_ENDINGS[:-1])} or .{DATASET_ENDINGS[-1]}")


def _replaced(tree: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a tree with another value at a path. Missing sections on the path are added:
    `{"a": 1}, ["b", "c"], 2 -> {"a": 1, "b": {"c": 2}}`."""
    if not path:
        return value
    if not path[0] or not isinstance(tree, Mapping | None):
        raise ValueError(f"{described(tree)} has no part {path[0]!r}: write the names of sections, such as a.b.c")
    fields = dict(cast("Mapping[str, Any]", tree or {}))
    section = fields.get(path[0])
    if path[0] == "dataset" and len(path) > 1:
        section = dataset_of_text(section)
    return fields | {path[0]: _replaced(section, path[1:], value)}


def _expanded(text: str, location: Location, path: KeyPath, problems: list[Problem]) -> str:
    """A text with the values of its variables, or the text of the prompt file that the text names."""
    missing: list[str] = []
    original, text = text, expand(text, missing)
    for name in missing:
        wrong = f"the variable {name} is not set: export it, or write a default, ${{{name}:-VALUE}}"
        problems.append(Problem(location, path, wrong))
    if not text.startswith("file://"):
        is_plain = text == original or isinstance(original, Quoted)
        return str(text) if is_plain else Expanded(text)
    file = location.folder / text.removeprefix("file://")
    try:
        if file.suffix.lower() not in PROMPT_SUFFIXES:
            raise ValueError(f"file:// reads texts, files named {' '.join(PROMPT_SUFFIXES)}: rename the file")
        return read_text(file)
    except ValueError as error:
        problems.append(Problem(location, path, str(error)))
        return text


def typed(value: Any) -> Any:
    """A value whose texts with variables become the numbers and booleans that YAML reads in the texts: `Expanded("3") -> 3`."""
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
    """The text with `${VAR}` and `${VAR:-default}` replaced. A default also counts for an empty variable. The names of variables
    that are not set are added to `missing`."""

    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        value = os.environ.get(name)
        if default is not None:
            return value or expand(default, missing)
        if value is None:
            missing.append(name)
        return value or ""

    return VARIABLE.sub(value_of, text)


# --- YAML ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Makes plain values of YAML. An alias becomes a copy. The first of repeated keys counts."""

    def __init__(self, location_at: Callable[[int, int], Location], path: KeyPath = ()) -> None:
        self._location_at = location_at  # from a line and a column, both from 0
        self._path = path
        self._yaml: Any = YAML(typ="safe", pure=True)  # Any: its members have no types
        self._yaml.max_depth = MAX_DEPTH
        self._document = Document(None, {path: location_at(0, 0)})

    def document(self, text: str) -> Document:
        """The document of a text.

        Raises:
            WrongInput: the text is not YAML.
        """
        try:
            root = self._yaml.compose(text)
            tree = None if root is None else self._value(root, self._path)
        except (YAMLError, ValueError, LookupError, RecursionError) as error:
            location, what = self._failure(error)
            what = f"not valid YAML: {what}; look at indentation, quotes and colons here and just before"
            raise _wrong(location, self._path, what) from error
        return Document(tree, self._document.locations, self._document.problems)

    def _value(self, node: Any, path: KeyPath) -> Any:
        self._document.locations.setdefault(path, self._location_at(node.start_mark.line, node.start_mark.column))
        if len(path) > MAX_DEPTH or len(self._document.locations) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, or a value that contains itself: use fewer aliases")
        if node.id == "scalar":
            if node.tag not in TEXT_TAGS:
                return self._yaml.constructor.construct_object(node)
            # In ruamel.yaml only a text without quotes, and not in a block, has no style.
            return Quoted(node.value) if node.style else node.value  # a date stays a text too
        if node.tag not in COLLECTION_TAGS:
            self._yaml.constructor.construct_undefined(node)
        if node.id == "sequence":
            return [self._value(entry, (*path, index)) for index, entry in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        lines: dict[str, int] = {}
        self._yaml.constructor.flatten_mapping(node)  # the keys that `<<:` merges come first
        num_merged = len(node.merge or ())
        for number, (key, value) in enumerate(node.value):
            name = self._yaml.constructor.construct_scalar(key)
            location, field_path = self._location_at(key.start_mark.line, key.start_mark.column), (*path, name)
            if name in lines:
                wrong = f"the key is repeated, first in line {lines[name]}: remove one of the two"
                self._document.problems.append(Problem(location, field_path, wrong))
                continue
            if number >= num_merged:  # a merged key may be written again, and then the written key wins
                lines[name] = location.line
            self._document.locations[field_path] = location
            fields[name] = self._value(value, field_path)
        return fields

    def _failure(self, error: Exception) -> tuple[Location, str]:
        """Where a text is not YAML, and why."""
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if mark is None:
            return self._location_at(0, 0), str(error).partition("\n")[0]
        what = str(getattr(error, "problem", None) or getattr(error, "context", None)).removeprefix("but ")
        begun: Any = getattr(error, "context_mark", None)
        if begun and begun.line != mark.line:
            what += f", for what begins in line {begun.line + 1}"
        return self._location_at(mark.line, mark.column), " ".join(what.split())


# --- words --------------------------------------------------------------------------------------------------------


def dotted(path: KeyPath) -> str:
    """A path as people write it: a.b[0].c."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def described(value: Any) -> str:
    """A wrong value in words: `3 -> "the number 3"`."""
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
    """The known name that is most like a wrong name; None if no known name has the `likeness`. Equal names have likeness 1."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known name, or all known names."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"known: {', '.join(names)}" if names else "there are none"
