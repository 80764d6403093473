import socket
import subprocess
import sys
from pathlib import Path

import pytest

from art_server.cli import UsageError, art, make_parser, open_port, parse
from art_server.errors import Conflict
from art_server.service import lock_path


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_without_keys_it_binds_to_loopback_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="API key is needed"):
        parse(["--host", host])
    assert parse(["--host", host, "--api-key", "k"]).api_keys[0].key == "k"
    monkeypatch.setenv("ART_API_KEY", "from-environment")
    assert parse(["--host", host]).api_keys[0].key == "from-environment"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_needs_no_key(host: str) -> None:
    assert parse(["--host", host]).api_keys == ()


def test_a_key_file_gives_scopes_and_projects(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# agents\none infer\ntwo train,infer p,q\n\nthree\n")
    one, two, three = parse(["--api-key-file", str(file)]).api_keys
    assert (one.scopes, one.projects) == ({"infer"}, None)
    assert (two.scopes, two.projects) == ({"infer", "train"}, {"p", "q"})
    assert three.scopes == {"infer", "train"}
    file.write_text("one admin\n")
    with pytest.raises(UsageError, match="line 1"):
        parse(["--api-key-file", str(file)])
    with pytest.raises(UsageError, match="cannot be read"):
        parse(["--api-key-file", str(tmp_path / "none")])


def test_engine_arguments_come_from_a_list() -> None:
    config = parse(["--engine-arg", "gpu-memory-utilization=0.5", "--engine-arg", "seed=1"])
    assert config.engine_args == {"gpu_memory_utilization": "0.5", "seed": "1"}
    for text in ("trust_remote_code=true", "host=0.0.0.0", "seed"):
        with pytest.raises(UsageError, match="one of"):
            parse(["--engine-arg", text])


def test_values_out_of_range_name_their_flag() -> None:
    with pytest.raises(UsageError, match=r"--max-loras.*greater"):
        parse(["--max-loras", "1"])
    with pytest.raises(UsageError, match="--wait-limit"):
        parse(["--wait-limit", "-1"])


def test_devices_are_lists_and_go_together() -> None:
    config = parse(["--serve-devices", "0,2-4", "--train-devices", "1"])
    assert (config.serve_devices, config.train_devices) == ((0, 2, 3, 4), (1,))
    assert not config.takes_turns and parse([]).takes_turns
    with pytest.raises(UsageError, match="go together"):
        parse(["--train-devices", "1"])
    with pytest.raises(UsageError, match="device 1 is both"):
        parse(["--serve-devices", "0-1", "--train-devices", "1"])
    with pytest.raises(UsageError, match="leave it out"):
        parse(["--serve-devices", "0", "--train-devices", "1", "--handover", "sleep"])
    for wrong in ("", "a", "1-", "-1", "1,,2"):
        with pytest.raises(SystemExit):
            parse(["--serve-devices", wrong, "--train-devices", "9"])


def test_art_run_is_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        art(["run", "--host", "0.0.0.0", "--port", "7999"])
    assert end.value.code == 2 and "--host 0.0.0.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        art(["run", "--help"])
    assert "--legacy-without-key" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        art(["--help"])
    assert "run a server" in capsys.readouterr().out
    assert parse(["--legacy-without-key"]).legacy_without_key


def test_every_flag_is_explained() -> None:
    for action in make_parser()._actions:
        assert action.help, action.dest


def test_a_taken_port_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="choose another port"):
            open_port("127.0.0.1", taken.getsockname()[1], "--port")


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    config = parse(["--path", str(tmp_path)])
    lock_path(config)
    with pytest.raises(Conflict, match="another art-server"):
        lock_path(config)


def test_without_its_extra_the_server_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    code = "from art_server.cli import main; main([])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "agent-reinforcement-trainer[server]" in result.stderr
