"""Data sets: what becomes of rows, and broken files."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art.finetune.errors import WrongInput
from art.finetune.reading import dataset_of_text
from art.finetune.rows import DatasetRow, load_rows
from art.finetune.sections import DatasetSection

FUNCTIONS = """\
def rows(file_path=None, number=2):
    return [{"question": f"{file_path} {index}", "answer": index} for index in range(number)]

def wrong():
    raise KeyError("no table")

def nothing():
    return None

def ends():
    raise SystemExit(2)

class Item:
    def __init__(self, number):
        self.id, self.input_obj, self.expected_output_obj = f"i{number}", "Q", number
        self.full_dataset_entry = {"level": number}

class EvalInput:
    eval_input_items = [Item(1), Item(2)]

def of_toolkit():
    return EvalInput()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def dataset(**fields: Any) -> DatasetSection:
    return DatasetSection.model_validate({"_type": "jsonl", **fields})


def written(name: str, text: str, **fields: Any) -> DatasetSection:
    Path(name).write_bytes(text.encode())
    return dataset(_type=Path(name).suffix[1:], file_path=name, **fields)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"id": "x", "question": "1+1?", "answer": "2"}, {"id": "y", "question": "2+2?", "answer": "4"}]'),
        (
            "a.jsonl",
            '{"id": "x", "question": "1+1?", "answer": "2"}\r\n\n{"id": "y", "question": "2+2?", "answer": "4"}',
        ),
        ("a.csv", '\ufeffid,question,answer\r\nx,1+1?,2\r\n\r\ny,"2+2?",4\r\n'),
    ],
)
def test_rows_of_files(name: str, text: str) -> None:
    loaded = load_rows(written(name, text))
    assert loaded.left_out == 0
    assert loaded.rows == [
        DatasetRow("x", "1+1?", "2", {"id": "x", "question": "1+1?", "answer": "2"}),
        DatasetRow("y", "2+2?", "4", {"id": "y", "question": "2+2?", "answer": "4"}),
    ]


def test_rows_of_parquet() -> None:
    polars = pytest.importorskip("polars")
    polars.DataFrame({"question": ["a", "b"], "answer": [1, 2]}).write_parquet("a.parquet")
    loaded = load_rows(dataset(_type="parquet", file_path="a.parquet"))
    assert [(row.id, row.question, row.answer) for row in loaded.rows] == [("1", "a", 1), ("2", "b", 2)]


def test_rows_of_functions() -> None:
    Path("made.py").write_text(FUNCTIONS)
    loaded = load_rows(dataset(_type="custom", function="made.py:rows", file_path="x", kwargs={"number": 3}))
    assert [row.question for row in loaded.rows] == ["x 0", "x 1", "x 2"]
    loaded = load_rows(dataset(_type="custom", function="made.of_toolkit"))
    assert loaded.rows[1] == DatasetRow("i2", "Q", 2, {"level": 2, "id": "i2", "question": "Q", "answer": 2})


def test_rows_without_a_question_are_left_out_and_counted() -> None:
    text = '{"question": "a"}\n{"question": " "}\n{"question": null}\n{"other": 1}\n{"question": "b"}\n'
    loaded = load_rows(written("a.jsonl", text))
    assert [(row.id, row.question) for row in loaded.rows] == [("1", "a"), ("5", "b")] and loaded.left_out == 3


def test_a_row_without_an_id_has_its_number() -> None:
    loaded = load_rows(
        written("a.jsonl", '{"id": 7, "question": "a"}\n{"id": null, "question": "b"}\n{"question": "c"}\n')
    )
    assert [row.id for row in loaded.rows] == ["7", "2", "3"]


def test_other_names_of_columns() -> None:
    text = "key,ask,wanted\nk,why?,because\n"
    structure = {"question_key": "ask", "answer_key": "wanted"}
    row = load_rows(written("a.csv", text, id_key="key", structure=structure)).rows[0]
    assert (row.id, row.question, row.answer) == ("k", "why?", "because")


def test_without_structure_the_question_is_the_row() -> None:
    loaded = load_rows(written("a.jsonl", '{"id": "x", "city": "Köln", "answer": 1}\n', structure={"disable": True}))
    assert loaded.rows[0].question == '{"id": "x", "city": "Köln", "answer": 1}' and loaded.rows[0].answer == 1


def test_a_question_that_is_no_text_becomes_json() -> None:
    loaded = load_rows(written("a.jsonl", '{"question": {"city": "Rome"}}\n{"question": 5}\n'))
    assert [row.question for row in loaded.rows] == ['{"city": "Rome"}', "5"]


SYSTEM, ASKED = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]}
CHATS: list[tuple[dict[str, Any], dict[str, Any], list[Any], Any]] = [
    ({"messages": [SYSTEM, ASKED, ANSWERED]}, {}, [SYSTEM, ASKED], "hello"),
    ({"messages": [SYSTEM, ASKED]}, {}, [SYSTEM, ASKED], None),
    ({"messages": [ASKED, ANSWERED], "answer": "given"}, {}, [ASKED], "given"),
    ({"messages": [SYSTEM, ASKED, ANSWERED, ASKED, ANSWERED]}, {}, [SYSTEM, ASKED, ANSWERED, ASKED], "hello"),
    ({"prompt": [ASKED], "answer": 4}, {"structure": {"question_key": "prompt"}}, [ASKED], 4),
    ({"messages": [ASKED | {"tool_calls": None}]}, {}, [ASKED], None),
    ({"messages": [PARTS]}, {}, [PARTS], None),
]


@pytest.mark.parametrize(("row", "fields", "messages", "answer"), CHATS)
def test_chat_rows_are_read_as_they_are(
    row: dict[str, Any], fields: dict[str, Any], messages: list[Any], answer: Any
) -> None:
    (loaded,) = load_rows(written("a.jsonl", json.dumps(row), **fields)).rows
    assert (loaded.question, loaded.messages, loaded.answer) == ("hi", messages, answer)
    assert loaded.columns.get("answer") == answer, "rewards get the columns"


def test_a_question_is_read_where_rows_have_messages_too() -> None:
    (row,) = load_rows(written("a.jsonl", json.dumps({"question": "why?", "messages": [ASKED]}))).rows
    assert (row.question, row.messages) == ("why?", [])


def test_chat_rows_of_a_table() -> None:
    polars = pytest.importorskip("polars")
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    polars.DataFrame({"messages": [[SYSTEM, ASKED, called, SYSTEM]]}).write_parquet("a.parquet")
    (row,) = load_rows(dataset(_type="parquet", file_path="a.parquet")).rows
    assert row.messages == [SYSTEM, ASKED, called, SYSTEM]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"limit": 2}, ["a", "b"]),
        ({"ids": ["3"]}, ["c"]),
        ({"ids": [3, "1"]}, ["a", "c"]),
        ({"limit": 9}, ["a", "b", "c"]),
    ],
)
def test_rows_are_chosen_by_number_and_id(fields: dict[str, Any], kept: list[str]) -> None:
    text = '{"question": "a"}\n{"question": "b"}\n{"question": "c"}\n'
    assert [row.question for row in load_rows(written("a.jsonl", text, **fields)).rows] == kept


def test_data_of_the_hub_are_read_by_the_datasets_library(folder: Path) -> None:
    pytest.importorskip("datasets")
    (folder / "saved").mkdir()
    for split in ("train", "test"):
        (folder / "saved" / f"{split}.jsonl").write_text(json.dumps({"question": split, "answer": "a"}) + "\n")
    (row,) = load_rows(dataset(_type="hub", name="./saved", split="test")).rows
    assert row == DatasetRow("1", "test", "a", {"question": "test", "answer": "a"})
    with pytest.raises(WrongInput, match=r"\./saved: cannot be read from the hub: .*none.*train"):
        load_rows(dataset(_type="hub", name="./saved", split="none"))


def test_without_the_datasets_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        WrongInput, match="openai/gsm8k: data of the hub need the package datasets: pip install datasets"
    ):
        load_rows(dataset(_type="hub", name="openai/gsm8k"))


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("a/b.csv", {"_type": "csv", "file_path": "a/b.csv"}),
        ("a/b.CSV", {"_type": "csv", "file_path": "a/b.CSV"}),
        ("b.tsv", {"_type": "csv", "file_path": "b.tsv", "delimiter": "\t"}),
        ("B.TSV", {"_type": "csv", "file_path": "B.TSV", "delimiter": "\t"}),
        ("b.JSONL", {"_type": "jsonl", "file_path": "b.JSONL"}),
        ("hub:openai/gsm8k", {"_type": "hub", "name": "openai/gsm8k"}),
        ("hub:squad:validation", {"_type": "hub", "name": "squad", "split": "validation"}),
        ("hub:o/n/main:train[:5%]", {"_type": "hub", "name": "o/n", "subset": "main", "split": "train[:5%]"}),
    ],
)
def test_a_data_set_can_be_one_text(text: str, section: dict[str, Any]) -> None:
    assert dataset_of_text(text) == section
    DatasetSection.model_validate(section)


@pytest.mark.parametrize(
    ("row_filter", "kept"),
    [
        ({"allowlist": {"field": {"level": [1, 2]}}}, ["a", "b"]),
        ({"denylist": {"field": {"level": [1]}}}, ["b", "c"]),
        ({"allowlist": {"field": {"level": [1, 2], "kind": ["x"]}}}, ["a"]),
        ({"denylist": {"field": {"level": [1], "kind": ["y"]}}}, ["c"]),
        ({"allowlist": {"field": {"kind": ["x"]}}, "denylist": {"field": {"level": [3]}}}, ["a"]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_filters(kind: str, row_filter: dict[str, Any], kept: list[str]) -> None:
    rows = [("a", 1, "x"), ("b", 2, "y"), ("c", 3, "x")]
    text = "question,level,kind\n" + "".join(f"{q},{n},{k}\n" for q, n, k in rows)
    if kind == "jsonl":
        text = "".join(f'{{"question": "{q}", "level": {n}, "kind": "{k}"}}\n' for q, n, k in rows)
    loaded = load_rows(written(f"a.{kind}", text, filter=row_filter))
    assert [row.question for row in loaded.rows] == kept and loaded.left_out == 0


BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("a.jsonl", "", {}, "a.jsonl: has no rows"),
    ("a.jsonl", "\n\n", {}, "a.jsonl: has no rows"),
    ("a.json", "", {}, "a.json: has no rows"),
    ("a.json", "[]", {}, "a.json: has no rows"),
    ("a.csv", "question,answer\n", {}, "a.csv: has no rows"),
    ("a.jsonl", '{"question": "a"}\n{"question": \n', {}, "a.jsonl: line 2, column 14 is not JSON (Expecting value)"),
    ("a.jsonl", '{"question": "a"}\n\n["b"]\n', {}, "a.jsonl: line 3 is a list: a row is an object"),
    ("a.jsonl", '[{"question": "a"}]\n', {}, "a.jsonl: line 1 is a list: a row is an object"),
    ("a.jsonl", '{"question": "a"}\n3\n', {}, "a.jsonl: line 2 is the number 3: a row is an object"),
    ("a.json", '[{"question": "a"},\n {"question" "b"}]', {}, "a.json: line 2, column 14 is not JSON"),
    ("a.json", '{"question": "a"}\n{"question": "b"}\n', {}, "_type: jsonl has one object a line"),
    ("a.json", '{"rows": []}', {}, "a.json: is a mapping: write the rows as a list of objects"),
    ("a.json", '[{"question": "a"}, null]', {}, "a.json: row 2 is empty: a row is an object"),
    ("a.json", "[" * 100_000, {}, "a.json: line 1 is nested too deeply"),
    ("a.csv", "question,answer\na,1\nb,2,3\n", {}, "a.csv: line 3 has 3 values for 2 columns"),
    ("a.csv", 'question,answer\na,1\n"b,2\n', {}, "is not CSV"),
    ("a.csv", "question,question\na,b\n", {}, "a.csv: line 1 has a column twice (question, question)"),
    (
        "a.jsonl",
        '{"prompt": "a", "answer": 1}',
        {},
        "no row has the column 'question'; the columns are prompt, answer; name one of them with "
        "`-o eval.general.dataset.structure.question_key COLUMN`",
    ),
    ("a.jsonl", '{"question": ["a", "b"]}', {}, "line 1, column 'question' is a list, and no text: a chat row is"),
    ("a.jsonl", '{"question": "a"}\n{"question": [{"from": "human"}]}', {}, "line 2, column 'question' is a list"),
    (
        "a.csv",
        "question|answer\na|1\n",
        {},
        "line 1 separates its columns with bars: set `-o eval.general.dataset.delimiter",
    ),
    ("a.csv", "question;answer\na;b;1\n", {}, "put values with semicolons in double quotes"),
    ("a.csv", "question\na\n", {"encoding": "latin-99"}, "cannot be read as latin-99: name its encoding"),
    ("a.jsonl", '{"id": "one", "question": "a"}', {"ids": ["on"]}, "no row has the id 'on'; did you mean 'one'?"),
    ("a.jsonl", '{"question": "a"}', {"ids": ["x"]}, "no row has the id 'x'; the first ids are 1"),
    ("a.jsonl", '{"question": "a"}', {"structure": {"question_key": "ask"}}, "no row has the column 'ask'"),
    ("a.jsonl", '{"question": ""}\n{"question": null}', {}, "a.jsonl: all 2 rows have an empty question"),
    (
        "a.jsonl",
        '{"id": "x", "question": "a"}\n{"id": "y", "question": "b"}\n{"id": "x", "question": "c"}\n',
        {},
        "a.jsonl: line 3 has the id 'x' of line 1: make the values of 'id' different",
    ),
    ("a.json", '[{"id": 1, "question": "a"}, {"id": "1", "question": "b"}]', {}, "row 2 has the id '1' of row 1"),
    (
        "a.csv",
        "question,level\na,1\n",
        {"filter": {"allowlist": {"field": {"levle": [1]}}}},
        "no row has the column 'levle' of the filter: did you mean 'level'?",
    ),
    (
        "a.csv",
        "question,level\na,1\n",
        {"filter": {"allowlist": {"field": {"level": [2]}}}},
        "the filter leaves none of 1 rows",
    ),
    ("a.parquet", "question", {}, "a.parquet: is no Parquet file"),
    (
        "made.py",
        FUNCTIONS,
        {"_type": "custom", "function": "made.py:wrong"},
        "the function failed (KeyError: 'no table')",
    ),
    ("made.py", FUNCTIONS, {"_type": "custom", "function": "made.py:nothing"}, "it must return a list of rows"),
    ("made.py", FUNCTIONS, {"_type": "custom", "function": "made.py:ends"}, "SystemExit(2)"),
]


@pytest.mark.parametrize(("name", "text", "fields", "words"), BROKEN)
def test_a_broken_data_set_is_one_sentence(name: str, text: str, fields: dict[str, Any], words: str) -> None:
    Path(name).write_text(text)
    section = {"_type": Path(name).suffix[1:], "file_path": name, **fields}
    if section["_type"] == "custom":
        del section["file_path"]
    with pytest.raises(WrongInput) as error:
        load_rows(DatasetSection.model_validate(section))
    assert len(error.value.problems) == 1 and words in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    for kind in ("json", "jsonl", "csv", "parquet"):
        with pytest.raises(WrongInput, match=f"none: no such file: {folder}/none"):
            load_rows(dataset(_type=kind, file_path="none"))
        with pytest.raises(WrongInput, match="Is a directory"):
            load_rows(dataset(_type=kind, file_path=str(folder)))
    Path("binary.csv").write_bytes(b"question\n\xff\x81\n")
    with pytest.raises(WrongInput, match="cannot be read as Windows-1252: name its encoding with"):
        load_rows(dataset(_type="csv", file_path="binary.csv"))
    Path("latin.jsonl").write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(WrongInput, match="not UTF-8 in line 1"):
        load_rows(dataset(file_path="latin.jsonl"))


@pytest.mark.parametrize(
    ("delimiter", "encoding", "fields", "read_as"),
    [
        (",", "utf-8", {}, ""),
        (",", "utf-8-sig", {}, ""),
        (";", "utf-8-sig", {}, "read as UTF-8, columns separated by semicolons"),
        (";", "cp1252", {}, "read as Windows-1252, columns separated by semicolons"),
        ("\t", "utf-16", {}, "read as UTF-16, columns separated by tabs"),
        (",", "cp1252", {}, "read as Windows-1252, columns separated by commas"),
        ("|", "utf-8", {"delimiter": "|"}, ""),
        (";", "mac_roman", {"delimiter": ";", "encoding": "mac_roman"}, ""),
    ],
)
def test_tables_of_excel_are_read(delimiter: str, encoding: str, fields: dict[str, str], read_as: str) -> None:
    lines = [["question", '"answer, short; long"'], ["Stra\u00dfe, wo?", "1\u00a0\u20ac"]]
    text = "\r\n".join(
        delimiter.join(f'"{value}"' if "," in value and value[0] != '"' else value for value in line) for line in lines
    )
    Path("a.csv").write_bytes(text.encode(encoding))
    loaded = load_rows(dataset(_type="csv", file_path="a.csv", **fields))
    columns = {"question": "Stra\u00dfe, wo?", "answer, short; long": "1\u00a0\u20ac"}
    assert [row.columns for row in loaded.rows] == [columns] and loaded.read_as == read_as
