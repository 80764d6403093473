"""The end of a log file: of the latest process, whole lines."""

from pathlib import Path

import pytest

from art_protocol.log_file import LINE_BYTES, LogFile


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "logs" / "engine.log")


def test_the_tail_has_as_many_lines_as_were_asked_for(log: LogFile) -> None:
    lines = [f"{number} {'x' * 200}" for number in range(2000)]
    log.path.parent.mkdir()
    log.path.write_text("\n".join(lines) + "\n")
    assert log.tail(1500).splitlines() == lines[-1500:]


def test_a_line_whose_beginning_is_missing_is_left_out(log: LogFile) -> None:
    log.path.parent.mkdir()
    log.path.write_text(f"{'x' * 3 * LINE_BYTES}\nfirst\nsecond\n")
    assert log.tail(3).splitlines() == ["first", "second"]
    log.path.write_text("y" * 3 * LINE_BYTES)
    assert log.tail(1) == "y" * LINE_BYTES, "of a single long line, its end"


def test_the_tail_is_that_of_the_latest_process(log: LogFile) -> None:
    assert log.tail() == ""
    with log.open() as written:
        written.write(b"old\n")
    with log.open() as written:
        written.write(b"new\nnewer\n")
    assert log.tail() == "new\nnewer"
