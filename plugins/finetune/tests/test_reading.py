"""Reading a file: places, repeated keys, base files, variables, prompts, overrides."""

from pathlib import Path
from typing import Any

import pytest

from art.finetune.errors import WrongInput
from art.finetune.reading import Document, described, dotted, of_dict, read


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str, *overrides: tuple[str, Any], name: str = "a.yml") -> Document:
    Path(name).write_text(text)
    return read(Path(name), overrides)


def problems(path: Path = Path("a.yml"), *overrides: tuple[str, Any]) -> list[str]:
    """What is wrong with a file."""
    try:
        return [str(problem) for problem in read(path, overrides).problems]
    except WrongInput as error:
        return error.problems


def test_each_value_has_the_place_of_its_key() -> None:
    document = written("a:\n  b: 1\n  c: [x, y]\n")
    assert document.tree == {"a": {"b": 1, "c": ["x", "y"]}} and not document.problems
    assert str(document.location_of(("a", "b"))) == "a.yml:2:3"
    assert str(document.location_of(("a", "c", 1))) == "a.yml:3:10"


def test_a_missing_value_has_the_place_of_its_section() -> None:
    document = written("# remark\na:\n  b: 1\n")
    assert str(document.location_of(("a", "x", "y"))) == "a.yml:2:1"
    assert str(document.location_of(("z",))) == "a.yml:1:1"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("4.5E3", 4500.0),
        ("010", 10),
        ("12:30", "12:30"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("2026-11-28", "2026-11-28"),
        ("'1'", "1"),
        ("=", "="),
        ("|\n  two\n  lines", "two\nlines\n"),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    document = written(f"a: {text}\n")
    assert document.tree == {"a": value} and not document.problems


def test_every_repeated_key_is_a_problem_with_both_lines() -> None:
    document = written("a:\n  b: 1\n  b: 2\na: 3\nc: 4\nc: 5\n")
    assert problems() == [
        "a.yml:3:3: a.b: the key is repeated, first in line 2: remove one of the two",
        "a.yml:4:1: a: the key is repeated, first in line 1: remove one of the two",
        "a.yml:6:1: c: the key is repeated, first in line 5: remove one of the two",
    ]
    assert document.tree == {"a": {"b": 1}, "c": 4}


def test_aliases_and_merge_keys() -> None:
    document = written("a: &x {p: 1, q: 2}\nb:\n  <<: *x\n  q: 3\nc: *x\n")
    assert document.tree == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}, "c": {"p": 1, "q": 2}}
    assert str(document.location_of(("b", "p"))) == "a.yml:1:8"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!python/object/apply:os.system [ls]", "a.yml:1:4: not valid YAML: could not determine"),
        ("a: !!python/name:os.system x", "a.yml:1:4: not valid YAML: could not determine"),
        ("a: !mine {b: 3}", "a.yml:1:4: not valid YAML: could not determine"),
        ("a: !!int x", "a.yml:1:1: not valid YAML: invalid literal"),
        ("a: &x\n  b: *x", "contains itself"),
        ("a: [1, 2", "a.yml:1:9: not valid YAML"),
        ("a:\n  b: [1,\nc: 2", "expected ',' or ']', but got"),
        ("a: {\n  b: 1\n", "got '<stream end>', for what begins in line 1;"),
        ("a: 1\n\tb: 2", "a.yml:2:1: not valid YAML"),
        ("a: b: c", "a.yml:1:5: not valid YAML: mapping values are not allowed here"),
        ("a: *nothing", "a.yml:1:4: not valid YAML: found undefined alias 'nothing'"),
        ("a: 1\n---\nb: 2", "a.yml:2:1: not valid YAML: found another document"),
        ("a: \x07", "a.yml:1:1: not valid YAML: unacceptable character"),
        ("? [a]\n: 1", "a.yml:1:3: not valid YAML: expected a scalar"),
        ("a: {<<: 3}", "a.yml:1:9: not valid YAML: expected a mapping"),
        ("", "a.yml:1:1: the file is empty"),
        ("# only a remark", "a.yml:1:1: the file is empty"),
        ("- a\n- b", "a.yml:1:1: the file is a list: write sections"),
        ("hello", "the file is the text 'hello': write sections"),
        ("[" * 5000, "not valid YAML: maximum depth"),
    ],
)
def test_what_is_no_yaml_is_a_problem(text: str, problem: str) -> None:
    Path("a.yml").write_text(text)
    assert any(problem in message for message in problems()), problems()


def test_aliases_cannot_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
    Path("a.yml").write_text("\n".join(lines))
    assert "more than 100000 values" in problems()[0]


def test_files_that_cannot_be_read(folder: Path) -> None:
    Path("finetune.yml").write_text("")
    assert problems(Path("finetun.yml"))[0].endswith("finetun.yml; did you mean 'finetune.yml'?")
    assert problems(Path("b.yml")) == [f"b.yml: no such file: {folder}/b.yml; check the path"]
    assert "cannot be read: Is a directory" in problems(folder)[0]
    Path("latin.yml").write_bytes(b"a: 1\nb: caf\xe9\n")
    assert "is not UTF-8 in line 2: save it as UTF-8" in problems(Path("latin.yml"))[0]


def test_a_byte_order_mark_is_no_character() -> None:
    Path("bom.yml").write_bytes("\ufeffa: 1\n".encode())
    assert read(Path("bom.yml")).tree == {"a": 1}


def test_base_files_are_merged_deeply_and_lists_are_replaced() -> None:
    Path("below").mkdir()
    Path("below/c.yml").write_text("a: {x: 0, z: 9}\n")
    Path("below/b.yml").write_text("base: c.yml\na:\n  x: 1\n  list: [1, 2, 3]\n")
    document = written("base: below/b.yml\na:\n  y: 2\n  list: [4]\n")
    assert document.tree == {"a": {"x": 1, "y": 2, "z": 9, "list": [4]}}
    assert str(document.location_of(("a", "x"))) == "below/b.yml:3:3"
    assert str(document.location_of(("a", "y"))) == "a.yml:3:3"
    assert str(document.location_of(("a", "z"))) == "below/c.yml:1:11"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a.yml": "base: b.yml", "b.yml": "base: a.yml"}, "b.yml:1:1: base: the files name each other"),
        ({"a.yml": "base: a.yml"}, "a.yml:1:1: base: the files name each other as base (a.yml -> a.yml)"),
        ({"a.yml": "x: 1\nbase: none.yml"}, "a.yml:2:1: base: no such file: "),
        ({"a.yml": "base: [b.yml]"}, "a.yml:1:1: base: must be the path of a YAML file, not a list"),
        ({"a.yml": "base: b.yml", "b.yml": "- 1"}, "b.yml:1:1: the file is a list"),
    ],
)
def test_wrong_base_files(files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    assert problems()[0].startswith(problem), problems()


def test_variables_are_expanded_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "gpu-box")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NONE", raising=False)
    text = "a: http://${HOST}/v1\nb: ${NONE:-x}${EMPTY:-y}\nc: '[${EMPTY}]'\nd: $HOST ${}\ne: ${NONE:-${HOST:-z}}!\nf: ${NONE:-}\n"
    document = written(text)
    assert document.tree == {"a": "http://gpu-box/v1", "b": "xy", "c": "[]", "d": "$HOST ${}", "e": "gpu-box!", "f": ""}
    assert not document.problems


def test_every_unset_variable_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NONE", raising=False)
    document = written("a:\n  b: ${NONE}\nc: [x, '${NONE}']\nd: ${NONE}\n", ("d", "1"))
    assert problems(Path("a.yml"), ("d", "1")) == [
        "a.yml:2:3: a.b: the variable NONE is not set: export it, or write a default, ${NONE:-VALUE}",
        "a.yml:3:8: c[1]: the variable NONE is not set: export it, or write a default, ${NONE:-VALUE}",
    ]
    assert document.tree["d"] == 1


def test_a_prompt_is_read_from_the_folder_of_the_file_that_names_it() -> None:
    Path("below").mkdir()
    Path("below/prompt.txt").write_text("You are ${NOBODY}.\n")
    Path("below/b.yml").write_text("p: file://prompt.txt\n")
    document = written("base: below/b.yml\nq: file://below/prompt.txt\n")
    assert document.tree == {"p": "You are ${NOBODY}.\n", "q": "You are ${NOBODY}.\n"} and not document.problems
    Path("a.yml").write_text("p: file://none.md\nq: file://a.yml\n")
    assert "a.yml:1:1: p: no such file: " in problems()[0]
    assert "a.yml:2:1: q: file:// reads texts" in problems()[1]


def test_overrides_win_and_are_yaml() -> None:
    text = "base: b.yml\na: {b: 1, c: [x, y]}\nnothing:\n"
    Path("b.yml").write_text("a: {d: 2}\n")
    document = written(
        text,
        ("a.b", "1e-6"),
        ("a.d", "[1, two]"),
        ("new.part.key", "no"),
        ("nothing.e", "~"),
        ("f", ""),
    )
    assert document.tree == {
        "a": {"b": 1e-6, "c": ["x", "y"], "d": [1, "two"]},
        "nothing": {"e": None},
        "new": {"part": {"key": "no"}},
        "f": None,
    }
    assert str(document.location_of(("a", "b"))) == "-o a.b"
    assert str(document.location_of(("a", "d", 1))) == "-o a.d"
    assert not document.problems


def test_overrides_of_programs_have_any_value() -> None:
    document = written("a: 1\n", ("a", 0.5), ("b", ["x"]), ("c", {"d": True}))
    assert document.tree == {"a": 0.5, "b": ["x"], "c": {"d": True}}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("a.b.c", "1", "-o a.b.c: the number 1 has no part 'c'"),
        ("a.b.c.d", "1", "-o a.b.c.d: the number 1 has no part 'c'"),
        ("a.c.0", "1", "-o a.c.0: a list has no part '0'"),
        ("a..b", "1", "-o a..b: "),
        ("", "1", "has no part ''"),
        ("a.b", "[1", "-o a.b: not valid YAML"),
        ("a.b", "!!python/name:os.system x", "-o a.b: not valid YAML"),
        ("a.b", "{x: 1, x: 2}", "-o a.b: a.b.x: the key is repeated"),
    ],
)
def test_wrong_overrides(key: str, value: str, problem: str) -> None:
    Path("a.yml").write_text("a: {b: 1, c: [x]}\n")
    messages = problems(Path("a.yml"), (key, value))
    assert len(messages) == 1 and problem in messages[0], messages


def test_a_programs_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "gpu-box")
    Path("b.yml").write_text("a: {x: 1}\n")
    tree = {"base": "b.yml", "a": {"y": ("${HOST}", Path("p"))}}
    document = of_dict(tree, [("a.z", "3")])
    assert document.tree == {"a": {"x": 1, "y": ["gpu-box", Path("p")], "z": 3}} and not document.problems
    assert str(document.location_of(("a", "y"))) == "configuration"
    assert tree == {"base": "b.yml", "a": {"y": ("${HOST}", Path("p"))}}


def test_paths_and_values_in_words() -> None:
    assert dotted(("a", "b", 0, "c")) == "a.b[0].c" and dotted(()) == ""
    words = {None: "empty", True: "true", 3: "the number 3", "x": "the text 'x'"}
    assert [described(value) for value in words] == list(words.values())
    assert described({}) == "a mapping" and described([]) == "a list" and described(Path()) == "of type PosixPath"
    assert described("x" * 50) == f"the text '{'x' * 40}...'"
