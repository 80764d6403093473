"""The rows of a data set: json, jsonl, csv, parquet, or what a function returns."""

import csv
import importlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from art.finetune import components
from art.finetune.errors import WrongInput
from art.finetune.reading import described, hint, read_text
from art.finetune.sections import Columns, Dataset

Found: TypeAlias = tuple[str, dict[str, Any]]
"""A row, and where it stands: "line 3" or "row 3"."""


@dataclass(frozen=True, slots=True)
class Row:
    """One task."""

    id: str
    question: str
    answer: Any
    """None: the row has no such column."""
    columns: dict[str, Any]
    """The whole row."""


@dataclass(frozen=True, slots=True)
class Rows:
    rows: list[Row]
    left_out: int
    """Rows without a question."""


def load_rows(dataset: Dataset) -> Rows:
    """The rows of a data set that its filter keeps, without those that have no question.

    Raises:
        WrongInput: it cannot be read, or has no rows, or an id is repeated. The message has the file and the line.
    """
    name = str(dataset.file_path or dataset.function or f"the {dataset.type} data set")
    try:
        found = _read(dataset)
        if not found:
            raise ValueError("has no rows")
        return _select(dataset, found)
    except ValueError as error:
        raise WrongInput([f"{name}: {error}"]) from error


def _select(dataset: Dataset, found: Sequence[Found]) -> Rows:
    columns = list(dict.fromkeys(column for _, row in found for column in row))
    question_key, is_structured = dataset.structure.question_key, not dataset.structure.disable
    if is_structured and question_key not in columns:
        raise ValueError(
            f"no row has the column {question_key!r}; the columns are {', '.join(columns)}; set "
            "structure.question_key to one of them, or structure.disable to send whole rows"
        )
    kept = [(number, *each) for number, each in enumerate(found, 1) if _is_kept(dataset, each[1], columns)]
    if not kept:
        raise ValueError(f"the filter leaves none of {len(found)} rows: widen allowlist or denylist")
    rows: list[Row] = []
    first: dict[str, str] = {}
    for number, place, row in kept:
        question = _text(row.get(question_key)) if is_structured else _text(row)
        if not question.strip():
            continue
        key = str(number) if row.get(dataset.id_key) in (None, "") else str(row[dataset.id_key])
        if key in first:
            raise ValueError(
                f"{place} has the id {key!r} of {first[key]}: make the values of {dataset.id_key!r} different"
            )
        first[key] = place
        rows.append(Row(key, question, row.get(dataset.structure.answer_key), row))
    if not rows:
        raise ValueError(f"all {len(kept)} rows have an empty question: fill the column {question_key!r}")
    return Rows(rows, len(kept) - len(rows))


def _text(value: Any) -> str:
    """A question as text; what is no text as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_kept(dataset: Dataset, row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    allowed, denied = dataset.filter.allowlist or Columns(), dataset.filter.denylist or Columns()
    for column in (*allowed.field, *denied.field):
        if column not in columns:
            raise ValueError(f"no row has the column {column!r} of the filter: {hint(column, columns)}")
    is_allowed = all(_is_one_of(row.get(column), values) for column, values in allowed.field.items())
    return is_allowed and not any(_is_one_of(row.get(column), values) for column, values in denied.field.items())


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is in a list. In a CSV file all values are texts."""
    return any(value == each or str(value) == str(each) for each in values)


# --- files --------------------------------------------------------------------------------------------------------


def _read(dataset: Dataset) -> list[Found]:
    if dataset.type == "custom":
        return _call(dataset)
    if dataset.type == "xls":
        raise ValueError("xls files are not read: save the sheet as CSV, and set _type: csv")
    if dataset.file_path is None:
        raise ValueError("file_path is missing: add the path of the file")
    if dataset.type == "parquet":
        return _read_parquet(dataset.file_path)
    text = read_text(dataset.file_path)
    if dataset.type == "json":
        return _numbered(_parse_json(text))
    return list(_parse_jsonl(text) if dataset.type == "jsonl" else _parse_csv(text))


def _numbered(rows: Iterable[Any]) -> list[Found]:  # Any: a file or a function may have anything
    return [(f"row {number}", _object(f"row {number}", row)) for number, row in enumerate(rows, 1)]


def _object(place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f'{place} is {described(row)}: a row is an object with columns, such as {{"question": "..."}}')
    return {str(key): value for key, value in cast("Mapping[Any, Any]", row).items()}


def _parse_json(text: str) -> list[Any]:
    if not text.strip():
        raise ValueError("has no rows: the file is empty")
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        lines = [line for line in text.split("\n") if line.strip()]
        is_jsonl = error.msg == "Extra data" and len(lines) > 1 and lines[0].strip().startswith("{")
        remedy = "one object a line is _type: jsonl" if is_jsonl else "look for a comma or a quote there"
        raise ValueError(f"line {error.lineno}, column {error.colno} is not JSON ({error.msg}): {remedy}") from error
    except RecursionError:
        raise ValueError("is nested too deeply: write the rows as a list of objects") from None
    if not isinstance(value, list):
        raise ValueError(f"is {described(value)}: write the rows as a list of objects, or one a line with _type: jsonl")
    return cast("list[Any]", value)


def _parse_jsonl(text: str) -> Iterator[Found]:
    for number, line in enumerate(text.split("\n"), 1):
        place = f"line {number}"
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", type(error).__name__)
            raise ValueError(f"{place} is not JSON ({what}): write one object a line") from error
        if isinstance(row, list) and number == 1:
            raise ValueError("line 1 is a list, not an object: a list of objects is _type: json")
        yield place, _object(place, row)


def _parse_csv(text: str) -> Iterator[Found]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(lines, list[str]())]
        if repeated := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"line 1 has the column {repeated[0]!r} twice: rename one of the two")
        for values in lines:
            place = f"line {lines.line_num}"
            if not values:
                continue
            if len(values) != len(header):
                counts = f"{len(values)} values for {len(header)} columns"
                raise ValueError(f"{place} has {counts}: put values with commas in double quotes")
            yield place, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num} is not CSV ({error}): look for a quote there") from error


def _read_parquet(path: Path) -> list[Found]:
    try:
        polars: Any = importlib.import_module("polars")  # an extra; Any: its types are not installed everywhere
    except ModuleNotFoundError as error:
        raise ValueError("parquet needs polars: pip install 'agent-reinforcement-trainer[plotting]'") from error
    if not path.is_file():
        read_text(path)  # raises with the reason
    try:
        return _numbered(polars.read_parquet(path, glob=False).iter_rows(named=True))
    except (polars.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"is no Parquet file ({' '.join(str(error).split())[:200]}): write it again") from error


def _call(dataset: Dataset) -> list[Found]:
    if dataset.function is None:
        raise ValueError("function is missing: name the function that returns the rows")
    function = components.load("dataset", dataset.function)
    given = {} if dataset.file_path is None else {"file_path": dataset.file_path}
    try:
        result: Any = function(**given, **dataset.kwargs)
        found: list[Any] = list(getattr(result, "eval_input_items", result))  # NVIDIA's EvalInput
    except Exception as error:  # of any kind: it is the user's code
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the function failed ({what}): it must return a list of rows") from error
    is_of_toolkit = hasattr(result, "eval_input_items")
    return _numbered([_row_of_item(dataset, each) for each in found] if is_of_toolkit else found)


def _row_of_item(dataset: Dataset, item: Any) -> dict[str, Any]:  # Any: NVIDIA's EvalInputItem
    structure = dataset.structure
    entry: Any = item.full_dataset_entry
    columns = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    return columns | {
        dataset.id_key: item.id,
        structure.question_key: item.input_obj,
        structure.answer_key: item.expected_output_obj,
    }
