import fcntl
import os
import socket
import subprocess
import sys
import threading
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pytest

from art_server.cli import main, open_port
from art_server.engine.device.assignment import check_flags
from art_server.errors import Conflict, UsageError
from art_server.flags import make_parser, parse, settings_table
from art_server.store.files import lock_folder
from art_watch.terminal.cli import main as art
from tests.refusals import refused

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_without_keys_it_binds_to_loopback_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--api-key"):
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
    with pytest.raises(UsageError, match=r"--api-key-file .*line 1"):
        parse(["--api-key-file", str(file)])
    with pytest.raises(UsageError, match="--api-key-file"):
        parse(["--api-key-file", str(tmp_path / "none")])


def test_a_key_file_gives_names_and_expiry(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "one name=alice expires=2026-12-31\ntwo infer p expires=2026-12-31T12:30:00+02:00 name=bob\nthree= train\n"
    )
    one, two, three = parse(["--api-key-file", str(file)]).api_keys
    assert (one.name, one.owner, one.scopes) == ("alice", "alice", {"infer", "train"})
    assert one.expires == datetime(2026, 12, 31, tzinfo=UTC)
    assert two.expires == datetime(2026, 12, 31, 10, 30, tzinfo=UTC)
    assert (two.owner, two.projects, two.scopes) == ("bob", {"p"}, {"infer"})
    assert (three.key, three.scopes) == ("three=", {"train"})
    assert not three.is_expired


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("SECRET admin", "scopes: Input should be 'infer', 'train', 'host' or 'feedback'"),
        ("SECRET infer p q", "too many fields"),
        ("SECRET name=a name=b", "too many fields"),
        ("SECRET expires=soon", "expires: Input should be a valid datetime"),
        ("SECRET expires=", "expires: Input should be a valid datetime"),
        ("SECRET requests_per_minute=600", "an unknown field"),
        ("SECRET name=a/b", "name: String should match"),
        ("infer SECRET=c2VjcmV0", "an unknown field"),
        ("name=alice SECRET", "scopes: Input should be"),
        ("a SECRET::b", "scopes: Input should be"),
        ("SECRET::b", "a key must not contain '::'"),
        ("SECRET key=b", "an unknown field"),
    ],
)
def test_a_line_that_is_no_key_is_named_by_its_number_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, reason: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\ngood\n{line}\n")
    with pytest.raises(SystemExit):
        main(["--api-key-file", str(file)])
    told = capsys.readouterr().err
    assert f"line 4: {reason}" in told and "write KEY [SCOPES" in told
    assert "SECRET" not in told and "c2Vj" not in told
    with pytest.raises(UsageError) as error:
        parse(["--api-key-file", str(file)])
    assert "SECRET" not in "".join(traceback.format_exception(error.value))


def test_a_key_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="--api-key-file"):
        parse(["--api-key-file", str(file)])


def test_engine_arguments_come_from_a_list() -> None:
    config = parse(["--engine-arg", "gpu-memory-utilization=0.5", "--engine-arg", "seed=1"])
    assert config.engine_args == {"gpu_memory_utilization": "0.5", "seed": "1"}
    for text in ("trust_remote_code=true", "host=0.0.0.0", "seed"):
        with pytest.raises(UsageError, match="--engine-arg"):
            parse(["--engine-arg", text])


def test_web_origins_are_repeated_and_checked() -> None:
    config = parse(["--cors-origin", "https://shop.example", "--cors-origin", "http://localhost:3000"])
    assert config.cors_origins == ("https://shop.example", "http://localhost:3000")
    with pytest.raises(UsageError, match=r"--cors-origin: 'shop\.example' is no web origin"):
        parse(["--cors-origin", "shop.example"])
    with pytest.raises(UsageError, match=r"--cors-origin '\*' without API keys"):
        parse(["--cors-origin", "*"])


def test_values_out_of_range_name_their_flag() -> None:
    with pytest.raises(UsageError, match="--max-loras"):
        parse(["--max-loras", "1"])
    with pytest.raises(UsageError, match="--wait-limit"):
        parse(["--wait-limit", "-1"])
    with pytest.raises(UsageError, match="--keep-last"):
        parse(["--keep-last", "-1"])
    assert (parse([]).keep_last, parse(["--keep-last", "0"]).keep_last) == (50, 0)


def test_devices_are_lists_and_go_together() -> None:
    config = parse(["--serve-devices", "0,2-4", "--train-devices", "1"])
    assert (config.serve_devices, config.train_devices) == ((0, 2, 3, 4), (1,))
    check_flags(config)
    assert not config.takes_turns and parse([]).takes_turns
    with pytest.raises(UsageError, match="--train-devices"):
        check_flags(parse(["--train-devices", "1"]))
    with pytest.raises(UsageError, match="--train-devices"):
        check_flags(parse(["--serve-devices", "0-1", "--train-devices", "1"]))
    with pytest.raises(UsageError, match="--handover"):
        check_flags(parse(["--serve-devices", "0", "--train-devices", "1", "--handover", "sleep"]))
    for wrong in ("", "a", "1-", "-1", "1,,2"):
        with pytest.raises(SystemExit):
            parse(["--serve-devices", wrong, "--train-devices", "9"])


def test_flags_that_contradict_each_other_are_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder stays as it is, and the port, which is in use, is not opened."""
    tmp_path.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(SystemExit) as end:
        main(["--path", str(tmp_path), "--port", str(listening.getsockname()[1]), "--engines", "0"])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and lines[0].startswith("art-server: --engines 0: something has to")
    assert tmp_path.stat().st_mode & 0o777 == 0o755 and list(tmp_path.iterdir()) == []


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


def test_the_page_of_settings_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page.endswith("\n\n" + settings_table()), "run scripts/pages"


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="--port"):
            open_port("127.0.0.1", taken.getsockname()[1], "--port")


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    config = parse(["--path", str(tmp_path)])
    lock_folder(config.server_dir, config.path)
    with refused(Conflict, "path_in_use", "path"):
        lock_folder(config.server_dir, config.path)


def test_a_command_that_looks_stops_no_server(tmp_path: Path) -> None:
    """`art status` holds the folder's lock for a moment."""
    config = parse(["--path", str(tmp_path)])
    os.close(lock_folder(config.server_dir, config.path))
    looking = os.open(config.server_dir / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, [looking])
    timer.start()
    os.close(lock_folder(config.server_dir, config.path))
    timer.join()


def test_without_its_extra_the_server_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    result = subprocess.run(
        [sys.executable, "-c", "from art_server.__main__ import main; main()"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'art_client'}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "'.[server]'" in result.stderr


def test_a_request_to_the_model_hub_is_not_logged() -> None:
    program = """
import http.server, logging, threading
from art_server.process.children import set_up_logs
from huggingface_hub.utils import get_session
set_up_logs()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
server.RequestHandlerClass.log_message = lambda *_: None
threading.Thread(target=server.serve_forever, daemon=True).start()
assert get_session().get(f"http://127.0.0.1:{server.server_port}").status_code == 501
logging.getLogger("art_server").info("done")
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = result.stderr.splitlines()
    assert line.endswith("INFO art_server: done")
