"""Each flag that names a path, file, port or address is answered with one sentence if the value cannot be used. A flag that does
not exist is answered with the flag that was meant."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from art_server.cli import main
from art_server.flags import GROUPS, flag_of, make_parser
from art_server.machines import host
from art_server.settings import ServerConfig
from art_server.store.files import lock_folder
from art_watch.terminal import cli


class Wrong:
    """Values that no path can have, in a folder of a test."""

    def __init__(self, root: Path):
        self.file = root / "file"
        self.file.write_bytes(b"\xff\x00binary")
        self.below_file = self.file / "below"
        self.missing = root / "missing" / "below"
        self.folder = root / "folder"
        self.folder.mkdir()
        self.nowhere = Path("/proc/nothing/here")
        self.long = root / ("x" * 300)

    @property
    def folders(self) -> list[Path]:
        """No folder can be made there."""
        return [self.file, self.below_file, self.nowhere, self.long]

    @property
    def files(self) -> list[Path]:
        """No text file is there."""
        return [self.file, self.below_file, self.missing, self.folder, self.long]


@pytest.fixture
def wrong(tmp_path: Path) -> Wrong:
    return Wrong(tmp_path)


PORTS = ["-1", "65536", "http", "1.5"]
SERVER: dict[str, Callable[[Wrong], list[object]]] = {
    "--path": lambda wrong: [*wrong.folders],
    "--chat-template": lambda wrong: [*wrong.files],
    "--api-key-file": lambda wrong: [*wrong.files],
    "--port": lambda _: [*PORTS],
    "--inference-port": lambda _: [*PORTS],
    "--host": lambda _: ["no.such.host.invalid"],
}
"""The wrong values of each flag of `art-server` that names a path, file, port or address."""


def sentence(capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], object], *words: object) -> str:
    """What a command prints that ends with an error: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command([str(word) for word in words])
    printed = capsys.readouterr().err
    assert end.value.code in (1, 2), printed
    assert len(printed.splitlines()) == 1 and "Traceback" not in printed, printed
    return printed


def test_the_table_has_each_flag_of_the_server() -> None:
    named = {
        f"--{flag_of(name).name}"
        for name, field in ServerConfig.model_fields.items()
        if "Path" in str(field.annotation)
    }
    assert named | {"--port", "--inference-port", "--host"} == SERVER.keys()
    settings = [name for names in GROUPS.values() for name in names]
    assert sorted(settings) == sorted(ServerConfig.model_fields), "each is in one group of --help"


@pytest.mark.parametrize("flag", SERVER)
def test_the_server_says_what_is_wrong_with_a_flag(flag: str, wrong: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    for value in SERVER[flag](wrong):
        words = ["--path", wrong.folder] if flag != "--path" else []
        key = ["--api-key", "k"] if flag == "--host" else []
        port = ["--port", 0] if flag != "--port" else []
        said = sentence(capsys, main, *words, *key, *port, flag, value)
        assert said.startswith("art-server: ") and flag in said, said


def test_a_host_says_what_is_wrong_with_a_flag(
    wrong: Wrong, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k host\n")
    usual: dict[str, object] = {"--join": "http://127.0.0.1:9", "--token-file": key, "--path": wrong.folder / "h"}
    table: dict[str, list[object]] = {
        "--join": ["127.0.0.1:9", "gpu-box"],
        "--token-file": [*wrong.files],
        "--path": [*wrong.folders],
        "--engines": ["-1", "two"],
        "--ranks": ["-1", "9999", "x"],
        "--name": ["", "a/b"],
    }
    for flag, values in table.items():
        for value in values:
            words = [word for pair in {**usual, flag: value}.items() for word in pair]
            if flag == "--token-file" and value == wrong.file:
                assert "is not a text file" in sentence(capsys, host.main, *words)
                continue
            said = sentence(capsys, host.main, *words)
            assert said.startswith("art-server host: ") and flag in said, said


ART: dict[str, list[str]] = {
    "status": [],
    "runs": [],
    "show": ["p/a"],
    "plot": ["p/a"],
    "tail": [],
    "jobs": [],
    "view": ["--no-browser"],
    "export": ["p/a", "ROOT/out"],
    "import": ["ROOT", "--model", "q/b"],
    "copy": ["p/a", "file://ROOT/out"],
}
"""Words of each command that a flag is added to."""


def commands() -> dict[str, argparse.ArgumentParser]:
    (added,) = (action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(added.choices)


@pytest.mark.parametrize("command", ART)
def test_the_commands_say_what_is_wrong_with_a_path(
    command: str, wrong: Wrong, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [word.replace("ROOT", str(tmp_path)) for word in ART[command]]
    paths = [action for action in commands()[command]._actions if action.type is Path]
    assert paths
    for action in paths:
        for value in (wrong.file, wrong.below_file, wrong.missing, wrong.long):
            if action.option_strings:
                said = sentence(capsys, cli.main, command, *words, action.option_strings[0], value)
            elif command == "import":
                said = sentence(capsys, cli.main, command, value, *words[1:])
            elif command == "view":
                said = sentence(capsys, cli.main, command, value, *words)
            else:
                continue
            assert said.startswith("art: ") and "Errno" not in said, said


@pytest.mark.parametrize(
    "value", ["gpu-box", "ftp://gpu-box", "http://[::1", "http://127.0.0.1:9", "http://no.such.host.invalid"]
)
@pytest.mark.parametrize("command", ["status", "jobs", "tail"])
def test_the_commands_say_what_is_wrong_with_an_address(
    command: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentence(capsys, cli.main, command, "--url", value)
    assert value in said
    assert ("no machine has this name" in said) == value.endswith(".invalid")


@pytest.mark.parametrize("value", [*PORTS, "0"])
def test_the_port_of_the_page(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port" in sentence(capsys, cli.main, "view", "--port", value)


@pytest.mark.parametrize(
    ("command", "words", "wrong_flag", "meant"),
    [
        (main, ["--prot", "5"], "--prot", "--port"),
        (main, ["--base_model", "art/tiny"], "--base_model", "--base-model"),
        (main, ["--lora-rank=5"], "--lora-rank", "--max-lora-rank"),
        (cli.main, ["run", "--prot", "5"], "--prot", "--port"),
        (cli.main, ["status", "--pth", "x"], "--pth", "--path"),
        (cli.main, ["export", "a", "b", "--marge"], "--marge", "--merge"),
        (cli.main, ["finetune", "x.py:f", "--lerning_rate", "5"], "--lerning_rate", "--learning_rate"),
        (cli.main, ["eval", "x.yml", "--rebs", "5"], "--rebs", "--reps"),
        (host.main, ["--jion", "http://x"], "--jion", "--join"),
    ],
)
def test_a_flag_that_does_not_exist(
    command: Callable[[list[str]], object],
    words: list[str],
    wrong_flag: str,
    meant: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"there is no flag {wrong_flag}: did you mean {meant}? (`" in sentence(capsys, command, *words)


@pytest.mark.parametrize("word", ["--seed", "--verbose", "--provider"])
def test_a_flag_that_is_like_none_has_no_suggestion(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(capsys, cli.main, "eval", "x.yml", word, "5")
    assert f"there is no flag {word} (`" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "512"], "here it is --max-seq-length"),
        (["--tensor-parallel-size", "2"], "here it is --engine-arg tensor_parallel_size=VALUE"),
        (["serve", "art/tiny"], "'serve' is no flag: `art-server --base-model NAME` serves a base model"),
    ],
)
def test_words_of_vllm(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in sentence(capsys, main, *words)


def test_a_command_or_choice_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean status?" in sentence(capsys, cli.main, "statu")
    assert "here it is finetune" in sentence(capsys, cli.main, "train", "run.yml")
    assert "did you mean bfloat16?" in sentence(capsys, main, "--dtype", "bfloat")


def test_the_help_of_the_server_names_the_hosts_command_and_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "art-server host --help" in text
    for title in GROUPS:
        assert f"\n{title}:\n" in text


def test_every_argument_of_every_command_has_help() -> None:
    for name, parser in commands().items():
        for action in parser._actions:
            assert action.help, (name, action.dest)
    for action in make_parser()._actions:
        assert action.help, action.dest


def test_a_second_host_in_a_folder_names_this_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, folder = tmp_path / "key", tmp_path / "hosts" / "one"
    key.write_text("k host\n")
    lock = lock_folder(folder, folder)
    said = sentence(capsys, host.main, "--join", "http://127.0.0.1:9", "--token-file", key, "--path", folder)
    os.close(lock)
    assert f"another art-server works in {folder}: stop it, or give this one another --path" in said
