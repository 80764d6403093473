"""The commands, as processes."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art.finetune import FinetuneError, NoServer, NoSignal
from art.finetune.checking import check
from art.finetune.reading import of_dict
from art.finetune.rows import load_rows
from art.finetune.run_record import State
from art_finetune.commands import continuing_command, run_finetune
from plugins.finetune.tests.commands import parsed
from tests.makers.finetune_file import finetune_file

MISSING = "import sys; sys.modules.update(dict.fromkeys(['ruamel', 'ruamel.yaml', 'matplotlib'])); "


def test_other_commands_load_neither_its_packages_nor_the_client() -> None:
    code = MISSING + "sys.modules['art'] = None; from art_watch.terminal.cli import main; main(['runs', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_its_packages_the_extra_is_named() -> None:
    code = MISSING + "from art_watch.terminal.cli import main; main(['finetune', 'x.yml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'.[finetune]'" in done.stderr


def test_the_help_names_each_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("finetune", "--help")
    spellings = re.findall(r"^  (?:-\w [A-Z ]+, )?(--.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    flags = [re.findall(r"--[\w-]+", spelling) for spelling in spellings]
    assert ["--dataset"] in flags and ["--output_dir", "--output-dir"] in flags
    assert all(len(set(names)) == len(names) for names in flags)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_finetune(parsed("finetune", "--schema"))
    return json.loads(printed.getvalue())


def test_the_schema_has_all_sections_and_says_what_fields_mean(schema: dict[str, Any]) -> None:
    assert {"llms", "workflow", "eval", "finetuning"} <= schema["properties"].keys()
    sections = {**schema["$defs"], "the file": schema}
    silent = [
        f"{name}.{field}"
        for name, section in sections.items()
        for field, about in section.get("properties", {}).items()
        if not about.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"finetuning": {"num_epochs": "${N}", "enabled": "${E:-true}"}}, True),
        ({"finetuning": {"num_epochs": "three"}}, False),
        ({"finetuning": {"num_epoch": 3}}, False),
        ({"trainer_adapters": {"a": {"_type": "openpipe_art_trainer_adapter", "backend": {"url": "${URL}"}}}}, True),
        ({"trainer_adapters": {"a": {"_type": "x:y", "backend": {"url": "localhost"}}}}, False),
        ({"eval": {"general": {"dataset": {"_type": "${KIND}", "file_path": "a"}}}}, True),
    ],
)
def test_the_schema_takes_what_the_harness_takes(
    schema: dict[str, Any], change: dict[str, Any], is_valid: bool
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    whole = finetune_file({"url": "http://localhost:1"})
    assert validator.is_valid({**whole, **change}) is is_valid
    assert validator.is_valid({"base": "other.yml", **change}) is is_valid
    assert not validator.is_valid({name: whole[name] for name in ("llms", "eval") if name in whole})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `art.finetune.run` was called with."""
    calls: list[Any] = []

    async def run(file: Any, overrides: Any, *, fresh: bool) -> None:
        calls.extend((file, dict(overrides), fresh))

    monkeypatch.setattr("art.finetune.runs.run", run)
    return calls


def test_flags_set_the_file_and_overrides_win(asked: list[Any]) -> None:
    flags = (
        "--dataset",
        "a.json",
        "--validation-dataset=b.json",
        "--validation_interval",
        "2",
        "--validation-reps=4",
        "-o",
        "finetuning.num_epochs",
        "3",
    )
    run_finetune(parsed("finetune", "--config_file=f.yml", *flags))
    assert asked == [
        "f.yml",
        {
            "eval.general.dataset.file_path": Path("a.json"),
            "finetuning.validation.dataset": Path("b.json"),
            "finetuning.validation.interval": 2,
            "finetuning.validation.reps": 4,
            "finetuning.num_epochs": "3",
        },
        False,
    ]


def test_a_data_set_of_the_hub_replaces_a_file(asked: list[Any], folder: Path) -> None:
    run_finetune(parsed("finetune", "f.yml", "--dataset", "hub:openai/gsm8k/main:test", "--limit", "2", "--id", "7"))
    file, overrides, _ = asked
    assert file == "f.yml"
    config = check(of_dict(finetune_file({"url": "http://localhost:1"}), list(overrides.items())))
    dataset = config.eval.general.dataset
    assert (dataset.type, dataset.name, dataset.subset, dataset.split) == ("hub", "openai/gsm8k", "main", "test")
    assert (dataset.file_path, dataset.limit, dataset.ids) == (None, 2, ["7"])
    asked.clear()
    needed = ("--reward", "agent.py:score", "--base_model", "art/tiny")
    run_finetune(parsed("finetune", "agent.py:answer", "--dataset", "hub:openai/gsm8k", *needed))
    file, overrides, _ = asked
    assert check(of_dict(file, list(overrides.items()))).eval.general.dataset.name == "openai/gsm8k"


def test_a_function_needs_no_file(asked: list[Any], folder: Path) -> None:
    (folder / "rows.csv").write_text("question\nwhy\n")
    flags = (
        "--dataset",
        "rows.csv",
        "--reward",
        "agent.py:score",
        "--base_model",
        "art/tiny",
        "--learning-rate",
        "1e-3",
    )
    judge = ("--judge_model", "klug", "--judge_url", "http://localhost:8000/v1")
    run_finetune(parsed("finetune", "agent.py:answer", *flags, *judge, "--num_generations", "4", "--fresh"))
    file, overrides, fresh = asked
    options = {name: overrides.pop(f"eval.evaluators.reward.{name}") for name in ("judge_model", "base_url")}
    assert options == {"judge_model": "klug", "base_url": "http://localhost:8000/v1"}
    config = check(of_dict(file, list(overrides.items())))
    assert config.workflow.type == "agent.py:answer" and config.eval.evaluators["reward"].type == "agent.py:score"
    assert config.eval.general.dataset.file_path == Path("rows.csv")
    assert config.adapter.training.learning_rate == 1e-3 and config.adapter.backend.base_model == "art/tiny"
    assert config.builder.num_generations == 4 and fresh


@pytest.mark.parametrize(
    ("flags", "name", "output_dir"),
    [
        ("", "agent-answer", ".tmp/art/agent-answer"),
        ("--output_dir runs/low_rate", "agent-answer-low_rate", "runs/low_rate"),
        ("--output_dir runs/agent-answer", "agent-answer", "runs/agent-answer"),
        ("--name route", "route", ".tmp/art/route"),
        ("--name route --output_dir out", "route", "out"),
        ("--output_dir used", "known", "used"),
        ("--output_dir used --fresh", "agent-answer-used", "used"),
    ],
)
def test_runs_in_folders_of_their_own_have_models_of_their_own(
    asked: list[Any], folder: Path, flags: str, name: str, output_dir: str
) -> None:
    known = finetune_file({"name": "known"})
    (folder / "used").mkdir()
    (folder / "used" / "state.json").write_bytes(State(config=known).model_dump_json().encode())
    usual = ["--dataset", "rows.json", "--reward", "agent.py:score", "--base_model", "art/tiny"]
    run_finetune(parsed("finetune", "agent.py:answer", *usual, *flags.split()))
    file, overrides, _ = asked
    config = check(of_dict(file, list(overrides.items())))
    assert (config.adapter.backend.name, config.finetuning.output_dir) == (name, Path(output_dir))


@pytest.mark.parametrize(
    "arguments",
    [
        ["finetune"],
        ["finetune", "a.yml", "--config_file", "b.yml"],
        ["finetune", "a.yml", "--reward", "agent.py:score"],
        ["finetune", "a.yml", "--learning_rate", "1"],
        ["finetune", "a.yml", "--name", "a"],
        ["finetune", "a.yml", "--judge_model", "a"],
        ["finetune", "agent.py:answer", "--dataset", "rows.json"],
    ],
    ids=" ".join,
)
def test_flags_that_do_not_fit_are_refused(
    asked: list[Any], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_finetune(parsed(*arguments))
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("art: ") and not asked


def test_a_command_line_needs_a_file(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_finetune(parsed("finetune", "bash agent.sh --url http://localhost", "--dataset", "rows.json"))
    assert ended.value.code == 2 and not asked
    assert "is a command line, which a file names (`_type: command`)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--reward agent.py:scor", "art: --reward: agent.py has no 'scor': did you mean 'score'?"),
        ("--learning_rate -1", "art: --learning_rate: "),
        ("--name a/b", "art: --name: 'a/b' becomes a folder"),
        ("--num_epochs 0", "art: --num_epochs: must be greater than or equal to 1, not the number 0"),
        ("--dataset none.csv", "none.csv: no such file"),
        (
            "--dataset agent.py",
            "art: --dataset agent.py: name a file that ends with .json, .jsonl, .csv, .tsv or .parquet",
        ),
        ("--dataset own.csv", "`-o eval.general.dataset.structure.question_key COLUMN`"),
        ("--dataset none", "art: --dataset none: no such file: "),
        (
            "--validation_dataset 0.25",
            "0.25; a share of the training rows is finetuning.validation.share (--validation_share)",
        ),
        (
            "--validation_dataset rows.csv --validation_share 0.2",
            "share stands in place of dataset: leave one of the two out",
        ),
        ("--validation_share 1.5", "art: --validation_share: must be less than 1, not the number 1.5"),
        ("--patience 2", "art: --patience: needs validations: add finetuning.validation.dataset or share"),
        ("--question_key ask", "no row has the column 'ask'"),
        ("--validation_dataset none.csv", "art: --validation_dataset: none.csv: no such file"),
        ("--output_dir rows.csv/out", "rows.csv/out cannot be used (Not a directory): name a folder"),
    ],
)
def test_a_wrong_value_names_the_flag_that_was_typed(
    flags: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"rows": "question,answer", "own": "ticket,answer"}.items():
        (folder / f"{name}.csv").write_text(f"{text}\nwhy,1\n")
    usual = ["--dataset", "rows.csv", "--reward", "agent.py:score", "--base_model", "art/tiny"]
    server = [
        "-o",
        "trainer_adapters.adapter.backend.ip",
        "127.0.0.1",
        "-o",
        "trainer_adapters.adapter.backend.port",
        "9",
    ]
    with pytest.raises(SystemExit) as ended:
        run_finetune(parsed("finetune", "agent.py:answer", *usual, *flags.split(), *server))
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and said in printed and len(printed.splitlines()) == 1, printed


def test_the_flag_that_names_a_column_helps(folder: Path) -> None:
    (folder / "own.csv").write_text("ticket,answer\nwhy,1\n")
    file = finetune_file({}, "own.csv")
    overrides = [("eval.general.dataset.structure.question_key", "ticket")]
    (row,) = load_rows(check(of_dict(file, overrides)).eval.general.dataset).rows
    assert row.question == "why"


@pytest.mark.parametrize(("error", "code"), [(FinetuneError, 1), (NoSignal, 3), (NoServer, 4)])
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[FinetuneError], code: int
) -> None:
    async def run(*_: Any, **__: Any) -> None:
        raise error("the reason")

    monkeypatch.setattr("art.finetune.runs.run", run)
    with pytest.raises(SystemExit) as ended:
        run_finetune(parsed("finetune", "f.yml"))
    assert ended.value.code == code and capsys.readouterr().err == "art: the reason\n"


def test_a_wrong_file_ends_with_2_and_its_place(tmp_path: Path) -> None:
    (tmp_path / "wrong.yml").write_text("workflow:\n  _type: agent.py:answer\nfinetunning: {}\n")
    code = "from art_watch.terminal.cli import main; main(['finetune', 'wrong.yml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and "wrong.yml:3:1: finetunning" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.yml"]


def test_the_command_that_continues_can_be_pasted_and_has_no_secrets() -> None:
    typed = ["finetune", "my file.yml", "--fresh", "-o", "finetuning.target_functions", '["<workflow>"]']
    command = "art finetune 'my file.yml' -o finetuning.target_functions '[\"<workflow>\"]'"
    assert continuing_command(typed) == command
    assert shlex.split(command) == ["art", *(word for word in typed if word != "--fresh")]
    typed += [
        "-o",
        "llms.policy.api_key",
        "sk-typed",
        "--override",
        "trainer_adapters.a.backend.url",
        "http://a:pw@host",
    ]
    hidden = "-o llms.policy.api_key and -o trainer_adapters.a.backend.url"
    assert continuing_command(typed) == f"{command} with {hidden} as before"


@pytest.mark.parametrize(
    ("flag", "alternative"),
    [
        ("--endpoint", "passes the rollout's address"),
        ("--endpoint_timeout", "rollout_timeout_seconds"),
        ("--result_json_path", "evaluator"),
        ("--result-json-path", "evaluator"),
        ("--validation_config_file", "finetuning.validation"),
    ],
)
def test_flags_of_the_toolkit_that_are_refused_name_the_alternative(
    flag: str, alternative: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("finetune", "a.yml", flag, "value")
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and alternative in line and flag in line
