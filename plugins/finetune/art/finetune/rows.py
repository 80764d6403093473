"""The rows of a data set: json, jsonl, csv, parquet, a data set of the Hugging Face hub, or what a function returns.

A row has a question, which is a text or a list of chat messages.
"""

import codecs
import contextlib
import csv
import hashlib
import importlib
import io
import json
import random
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import httpx

from art.contained import contained
from art.finetune import components
from art.finetune.errors import WrongInput
from art.finetune.reading import described, hint, nearest, read_bytes, read_text
from art.finetune.sections import Columns, DatasetSection

LocatedRow: TypeAlias = tuple[str, dict[str, Any]]
"""Where a row is in the data set ("line 3" or "row 3"), and the columns of the row."""
MESSAGES = "messages"
"""The column of chat rows."""
SHOWN_IDS = 5
"""Ids that an error lists."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
"""Characters between the columns of a CSV file, of which the first line shows one. Excel writes commas or semicolons, as usual in the
user's country."""
QUOTED = re.compile(r'"[^"]*"')
FIRST_LINE = re.compile(r'(?:"[^"]*"|[^"\r\n])*')
ENCODINGS = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
"""Encodings of CSV files that are found without `encoding`. Excel writes all of them."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One task."""

    id: str
    question: str
    answer: Any
    """None: the row has no such column."""
    columns: dict[str, Any]
    """The whole row. A chat row without an answer of its own has the answer at its end in the column of answers."""
    location: str = field(default="", compare=False)
    """Where the row is in the data set: "line 3" or "row 3"."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], compare=False)
    """The messages of a chat row, up to the last message that an answer follows. Empty: the question is a text."""


@dataclass(frozen=True, slots=True)
class Rows:
    rows: list[DatasetRow]
    left_out: int
    """Rows without a question."""
    read_as: str = ""
    """How a CSV file was read that has another encoding than UTF-8, or another delimiter than commas."""


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


def load_rows(
    dataset: DatasetSection,
    section: str = "eval.general.dataset",
    question_parameter: str | None = None,
    apart_by: Sequence[str] = (),
) -> Rows:
    """The rows of a data set that its filter keeps, without rows that have no question. `section` is the section's name in the
    file, for errors. `question_parameter` is a column of the question, if the data set names none. Rows may repeat an id if a
    column of `apart_by` differs.

    Raises:
        WrongInput: the data set cannot be read, has no rows, or repeats an id. The message has the file and the line.
    """
    name = str(dataset.file_path or dataset.function or dataset.name or f"the {dataset.type} data set")
    try:
        located_rows, read_as = _read(dataset, section)
        if not located_rows:
            raise ValueError('has no rows: a row is an object with columns, such as {"question": "..."}')
        return replace(_select(dataset, located_rows, section, question_parameter, apart_by), read_as=read_as)
    except ValueError as error:
        raise WrongInput([f"{name}: {error}"]) from error


def select(rows: Sequence[DatasetRow], ids: Sequence[str], limit: int | None) -> list[DatasetRow]:
    """The rows with these ids, or all rows without ids; of them the first `limit`.

    Raises:
        ValueError: no row has one of the ids, or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    known = {row.id for row in rows}
    for row_id in ids:
        if row_id not in known:
            near = nearest(row_id, known)
            first = ", ".join(row.id for row in rows[:SHOWN_IDS])
            meant = f"did you mean {near!r}?" if near else f"the first ids are {first}"
            raise ValueError(f"no row has the id {row_id!r}; {meant}")
    kept = [row for row in rows if not ids or row.id in ids]
    return kept[:limit]


def hold_out(rows: Sequence[DatasetRow], share: float, seed: int | None) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """The rows that are trained, and the share of the rows that is held out, in their order. The same rows and seed give the same
    choice.

    Raises:
        ValueError: no row would be trained.
    """
    num_held_out = max(1, round(share * len(rows)))
    if num_held_out >= len(rows):
        raise ValueError(f"a share of {share:g} leaves none of {len(rows)} rows to train: lower it, or add rows")
    chosen = set(random.Random(f"{seed or 0}/held out").sample(range(len(rows)), num_held_out))
    trained = [row for index, row in enumerate(rows) if index not in chosen]
    return trained, [row for index, row in enumerate(rows) if index in chosen]


def _select(
    dataset: DatasetSection,
    located_rows: Sequence[LocatedRow],
    section: str,
    question_parameter: str | None,
    apart_by: Sequence[str],
) -> Rows:
    columns = list(dict.fromkeys(column for _, row in located_rows for column in row))
    is_structured, question_key = not dataset.structure.disable, _question_column(dataset, columns, question_parameter)
    if is_structured and question_key not in columns:
        raise ValueError(
            f"no row has the column {question_key!r}; the columns are {', '.join(columns)}; name one of them with "
            f"`-o {section}.structure.question_key COLUMN`, or send whole rows with `-o {section}.structure.disable true`"
        )
    kept: list[tuple[int, str, dict[str, Any]]] = []
    for number, (location, row) in enumerate(located_rows, 1):
        if _is_kept(dataset, row, columns):
            kept.append((number, location, row))
    if not kept:
        raise ValueError(f"the filter leaves none of {len(located_rows)} rows: widen allowlist or denylist")
    rows: list[DatasetRow] = []
    first: dict[tuple[str, ...], str] = {}
    for number, location, row in kept:
        value, answer = row.get(question_key), row.get(dataset.structure.answer_key)
        messages = list[dict[str, Any]]()
        if is_structured and isinstance(value, list):
            messages, last = _conversation(cast("list[Any]", value), f"{location}, column {question_key!r}", section)
            if answer is None and last is not None:
                answer, row = last, {**row, dataset.structure.answer_key: last}
            question = next((_content(message) for message in reversed(messages) if message["role"] == "user"), "")
        else:
            question = _text(value) if is_structured else _text(row)
        if not question.strip():
            continue
        key = str(number) if row.get(dataset.id_key) in (None, "") else str(row[dataset.id_key])
        names = key, *(str(row.get(column)) for column in apart_by)
        if names in first:
            raise ValueError(
                f"{location} has the id {key!r} of {first[names]}: make the values of {dataset.id_key!r} different"
            )
        first[names] = location
        rows.append(DatasetRow(key, question, answer, row, location, messages))
    if not rows:
        raise ValueError(f"all {len(kept)} rows have an empty question: fill the column {question_key!r}")
    return Rows(select(rows, dataset.ids, dataset.limit), len(kept) - len(rows))


def _question_column(dataset: DatasetSection, columns: Sequence[str], question_parameter: str | None) -> str:
    """The column with the question. In a data set that names none, the column that the workflow's parameter names; else the data set
    has chat rows if its rows have messages."""
    structure = dataset.structure
    if "question_key" in structure.model_fields_set or structure.question_key in columns:
        return structure.question_key
    others = (column for column in (question_parameter, MESSAGES) if column in columns)
    return next(others, None) or structure.question_key


def _conversation(value: list[Any], location: str, section: str) -> tuple[list[dict[str, Any]], Any]:
    """The messages of a chat row without the answer at their end, and this answer; None without an answer.

    Raises:
        ValueError: the list is no list of messages.
    """
    messages: list[dict[str, Any]] = []
    for entry in value:
        fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        if not isinstance(fields.get("role"), str):
            raise ValueError(
                f"{location} is a list, and no text: a chat row is a list of messages, such as "
                f'[{{"role": "user", "content": "..."}}]; `-o {section}.structure.disable true` sends whole rows as JSON'
            )
        # Tables have all fields of all messages.
        messages.append({name: part for name, part in fields.items() if part is not None or name == "content"})
    answer = None
    while messages and messages[-1]["role"] == "assistant":
        answer = _content(messages.pop())
    return messages, answer


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, also of a message whose content is a list of parts."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return _text(content)
    parts = [cast("dict[str, Any]", part) for part in cast("list[Any]", content) if isinstance(part, dict)]
    return "\n".join(str(part["text"]) for part in parts if "text" in part)


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


def _read(dataset: DatasetSection, section: str) -> tuple[list[LocatedRow], str]:
    """The rows, and `Rows.read_as`."""
    path = dataset.file_path or Path()
    if dataset.type == "csv":
        with _long_fields():
            return _read_csv(read_bytes(path), dataset, section)
    if dataset.type == "jsonl":
        return list(_parse_jsonl(read_text(path))), ""
    if dataset.type == "custom":
        rows = _call(dataset, str(dataset.function))
    elif dataset.type == "hub":
        rows = _rows_of_hub(dataset)
    elif dataset.type == "parquet":
        rows = _parse_parquet(read_bytes(path))
    else:
        rows = _parse_list(read_text(path))
    return _numbered(rows), ""


def _parse_list(text: str) -> list[Any]:
    rows: Any = _parse_json(text, 1) if text.strip() else []
    if not isinstance(rows, list):
        raise ValueError(f"is {described(rows)}: write the rows as a list of objects, or one a line with _type: jsonl")
    return cast("list[Any]", rows)


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


def _read_csv(data: bytes, dataset: DatasetSection, section: str) -> tuple[list[LocatedRow], str]:
    """The rows, and `Rows.read_as`."""
    encoding = dataset.encoding or _encoding_of(data)
    encoding_name = ENCODINGS.get(encoding, encoding)
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise ValueError(
            f"cannot be read as {encoding_name}: name its encoding with `-o {section}.encoding NAME`"
        ) from error
    delimiter = dataset.delimiter or _delimiter_of(text)
    rows = list(_parse_csv(text, delimiter, section))
    if encoding in (dataset.encoding, "utf-8-sig") and delimiter in (dataset.delimiter, ","):
        return rows, ""
    return rows, f"read as {encoding_name}, columns separated by {_delimiter_name(delimiter)}"


def _encoding_of(data: bytes) -> str:
    """A key of `ENCODINGS`."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _delimiter_of(text: str) -> str:
    """The delimiter that the first line has most often outside of quotes; a comma if the line has no delimiter."""
    match = FIRST_LINE.match(text)
    line = QUOTED.sub("", match[0] if match else "")
    return max(DELIMITERS, key=line.count)


def _delimiter_name(delimiter: str) -> str:
    return DELIMITERS.get(delimiter, repr(delimiter))


def _parse_csv(text: str, delimiter: str, section: str) -> Iterator[LocatedRow]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(lines, list[str]())]
        if len(header) == 1 and "|" in header[0]:
            raise ValueError(f"line 1 separates its columns with bars: set `-o {section}.delimiter '|'`")
        if len(set(header)) < len(header):
            raise ValueError(f"line 1 has a column twice ({', '.join(header)}): rename one of the two")
        for values in filter(None, lines):
            location = f"line {lines.line_num}"
            if len(values) != len(header):
                counts = f"{len(values)} values for {len(header)} columns"
                raise ValueError(
                    f"{location} has {counts}: put values with {_delimiter_name(delimiter)} in double quotes"
                )
            yield location, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num} is not CSV ({error}): look for a quote there") from error


def _parse_parquet(data: bytes) -> Iterable[Any]:
    try:
        polars: Any = importlib.import_module("polars")  # an extra; Any: its types are not installed everywhere
    except ModuleNotFoundError as error:
        raise ValueError("parquet needs polars: pip install '.[plotting]' in a clone of the repository") from error
    try:
        return polars.read_parquet(io.BytesIO(data)).iter_rows(named=True)
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"is no Parquet file ({' '.join(str(error).split())[:200]}): write it again") from error


def _rows_of_hub(dataset: DatasetSection) -> Iterable[Any]:
    """The rows of a data set of the hub, or of a folder with files of a data set."""
    try:
        datasets: Any = importlib.import_module("datasets")  # optional; Any: its types are not installed everywhere
    except ModuleNotFoundError as error:
        raise ValueError("data of the hub need the package datasets: pip install datasets") from error
    failures = (OSError, ValueError, datasets.exceptions.DatasetsError, httpx.HTTPError)
    try:
        return datasets.load_dataset(dataset.name, dataset.subset, split=dataset.split, revision=dataset.revision)
    except failures as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"cannot be read from the hub: {reason} (name, subset, split and revision say what is read)"
        ) from error


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
