"""The rows of a data set: json, jsonl, csv, parquet, or what a function returns."""

import contextlib
import csv
import hashlib
import importlib
import io
import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from art.contained import contained
from art.finetune import components
from art.finetune.errors import WrongInput
from art.finetune.reading import described, hint, read_bytes, read_text
from art.finetune.sections import Columns, DatasetSection

LocatedRow: TypeAlias = tuple[str, dict[str, Any]]
"""Where a row is in the data set ("line 3" or "row 3"), and the columns of the row."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One task."""

    id: str
    question: str
    answer: Any
    """None: the row has no such column."""
    columns: dict[str, Any]
    """The whole row."""
    location: str = field(default="", compare=False)
    """Where the row is in the data set: "line 3" or "row 3"."""


@dataclass(frozen=True, slots=True)
class Rows:
    rows: list[DatasetRow]
    left_out: int
    """Rows without a question."""


def digest(rows: Iterable[DatasetRow], *more: Any) -> str:
    """A hash of rows, and of more values."""
    sha = hashlib.sha256()
    for value in (*([row.id, row.question, row.answer, row.columns] for row in rows), *more):
        try:
            text = json.dumps(value, default=_stable)
        except (TypeError, ValueError, RecursionError):  # keys of any type, or a circle: a function may return anything
            text = _stable(value)
        sha.update(text.encode(errors="backslashreplace") + b"\0")
    return sha.hexdigest()[:16]


def _stable(value: Any) -> Any:
    """A value that JSON lacks, in a form that is equal in each process: a sorted set, or a text without memory addresses."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, cast("set[Any]", value)))
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""What separates the columns of tables that are no CSV in the strict sense."""
STRUCTURE = "eval.general.dataset.structure"
"""The section that names the columns, as `-o` and a file have it."""


def load_rows(dataset: DatasetSection) -> Rows:
    """The rows of a data set that its filter keeps, without rows that have no question.

    Raises:
        WrongInput: the data set cannot be read, has no rows, or repeats an id. The message has the file and the line.
    """
    name = str(dataset.file_path or dataset.function or f"the {dataset.type} data set")
    try:
        located_rows = _read(dataset)
        if not located_rows:
            raise ValueError("has no rows")
        return _select(dataset, located_rows)
    except ValueError as error:
        raise WrongInput([f"{name}: {error}"]) from error


def _select(dataset: DatasetSection, located_rows: Sequence[LocatedRow]) -> Rows:
    columns = list(dict.fromkeys(column for _, row in located_rows for column in row))
    question_key, is_structured = dataset.structure.question_key, not dataset.structure.disable
    if is_structured and question_key not in columns:
        raise ValueError(
            f"no row has the column {question_key!r}; the columns are {', '.join(columns)}: name one of them with `-o "
            f"{STRUCTURE}.question_key COLUMN`, or send whole rows with `-o {STRUCTURE}.disable true`"
        )
    kept: list[tuple[int, str, dict[str, Any]]] = []
    for number, (location, row) in enumerate(located_rows, 1):
        if _is_kept(dataset, row, columns):
            kept.append((number, location, row))
    if not kept:
        raise ValueError(f"the filter leaves none of {len(located_rows)} rows: widen allowlist or denylist")
    rows: list[DatasetRow] = []
    first: dict[str, str] = {}
    for number, location, row in kept:
        question = _text(row.get(question_key)) if is_structured else _text(row)
        if not question.strip():
            continue
        key = str(number) if row.get(dataset.id_key) in (None, "") else str(row[dataset.id_key])
        if key in first:
            raise ValueError(
                f"{location} has the id {key!r} of {first[key]}: make the values of {dataset.id_key!r} different"
            )
        first[key] = location
        rows.append(DatasetRow(key, question, row.get(dataset.structure.answer_key), row, location))
    if not rows:
        raise ValueError(f"all {len(kept)} rows have an empty question: fill the column {question_key!r}")
    return Rows(rows, len(kept) - len(rows))


def _text(value: Any) -> str:
    """A question as text. A value that is no text becomes JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_kept(dataset: DatasetSection, row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    allowed = (dataset.filter.allowlist or Columns()).field
    denied = (dataset.filter.denylist or Columns()).field
    for column in (*allowed, *denied):
        if column not in columns:
            raise ValueError(f"no row has the column {column!r} of the filter: {hint(column, columns)}")
    is_allowed = all(_is_one_of(row.get(column), values) for column, values in allowed.items())
    return is_allowed and not any(_is_one_of(row.get(column), values) for column, values in denied.items())


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is in a list. `"1"` counts as 1, because in a CSV file all values are texts."""
    return any(value == option or str(value) == str(option) for option in values)


# --- files --------------------------------------------------------------------------------------------------------


def _read(dataset: DatasetSection) -> list[LocatedRow]:
    if dataset.type == "custom":
        return _numbered(_call(dataset, str(dataset.function)))
    path = dataset.file_path or Path()
    if dataset.type == "parquet":
        return _numbered(_parse_parquet(read_bytes(path)))
    text = read_text(path)
    if dataset.type == "csv":
        with _long_fields():
            return list(_parse_csv(text))
    if dataset.type == "jsonl":
        return list(_parse_jsonl(text))
    rows: Any = _parse_json(text, 1) if text.strip() else []
    if not isinstance(rows, list):
        raise ValueError(f"is {described(rows)}: write the rows as a list of objects, or one a line with _type: jsonl")
    return _numbered(cast("list[Any]", rows))


def _numbered(rows: Iterable[Any]) -> list[LocatedRow]:  # Any: a file or a function may have anything
    return [(f"row {number}", _object(f"row {number}", row)) for number, row in enumerate(rows, 1)]


def _object(location: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(
            f'{location} is {described(row)}: a row is an object with columns, such as {{"question": "..."}}'
        )
    return {str(key): value for key, value in cast("Mapping[Any, Any]", row).items()}


def _parse_json(text: str, line: int) -> Any:
    """The value of a JSON text that begins in the line `line` of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        location, what = f"line {line + error.lineno - 1}, column {error.colno}", error.msg
        remedy = "_type: json is a list of objects, _type: jsonl has one object a line"
        raise ValueError(f"{location} is not JSON ({what}): {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"line {line} is nested too deeply: write rows as objects with columns") from error


def _parse_jsonl(text: str) -> Iterator[LocatedRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _object(f"line {number}", _parse_json(line, number))


@contextlib.contextmanager
def _long_fields() -> Generator[None]:
    """Allows CSV fields of any length in the block: Python's limit of 131,072 characters is less than a document. The limit
    belongs to the whole process, and is restored."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parse_csv(text: str) -> Iterator[LocatedRow]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(lines, list[str]())]
        if len(set(header)) < len(header):
            raise ValueError(f"line 1 has a column twice ({', '.join(header)}): rename one of the two")
        separators = [SEPARATORS[separator] for separator in SEPARATORS if separator in header[0]] if header else []
        if len(header) == 1 and separators:
            raise ValueError(f"line 1 has {separators[0]} and no comma: save the table as CSV with commas")
        for values in filter(None, lines):
            location = f"line {lines.line_num}"
            if len(values) != len(header):
                counts = f"{len(values)} values for {len(header)} columns"
                raise ValueError(f"{location} has {counts}: put values with commas in double quotes")
            yield location, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num} is not CSV ({error}): look for a quote there") from error


def _parse_parquet(data: bytes) -> Iterable[Any]:
    try:
        polars: Any = importlib.import_module("polars")  # an extra; Any: its types are not installed everywhere
    except ModuleNotFoundError as error:
        raise ValueError("parquet needs polars: pip install 'agent-reinforcement-trainer[plotting]'") from error
    try:
        return polars.read_parquet(io.BytesIO(data)).iter_rows(named=True)
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"is no Parquet file ({' '.join(str(error).split())[:200]}): write it again") from error


def _call(dataset: DatasetSection, name: str) -> list[Any]:
    function = components.load("dataset", name)
    arguments = {} if dataset.file_path is None else {"file_path": dataset.file_path}
    try:
        with contained("the function"):
            result: Any = function(**arguments, **dataset.kwargs)
            rows = None if hasattr(result, "eval_input_items") else list(result)
        if rows is not None:
            return rows
        return [_row_of_item(dataset, item) for item in result.eval_input_items]  # NVIDIA's EvalInput
    except Exception as error:  # of any kind: it is the user's code
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the function failed ({what}): it must return a list of rows") from error


def _row_of_item(dataset: DatasetSection, item: Any) -> dict[str, Any]:  # Any: NVIDIA's EvalInputItem
    columns: Any = item.full_dataset_entry
    structure = dataset.structure
    named = {structure.question_key: item.input_obj, structure.answer_key: item.expected_output_obj}
    return {**(columns if isinstance(columns, dict) else {}), dataset.id_key: item.id, **named}
