"""Several threads share the server's database."""

import threading
from pathlib import Path

import pytest

from art_server.store.database import overwriting
from art_server.store.server_database import open_server_database
from tests.waiting import PATIENCE_SECONDS

NUMBERS = "SELECT number FROM jobs ORDER BY number"
ADD = "INSERT INTO jobs (job_id, model, request_digest, config, created_at, report) VALUES (?, 1, '', '', 0, '')"


def test_a_read_waits_for_no_change_of_another_thread(tmp_path: Path) -> None:
    database = open_server_database(tmp_path)
    may_end, has_begun = threading.Event(), threading.Event()
    seen: list[int] = []

    def change() -> None:
        with database.changes("a test") as connection:
            connection.execute(ADD, ("first",))
            seen.extend(number for (number,) in database.select(NUMBERS))
            has_begun.set()
            may_end.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=change)
    thread.start()
    assert has_begun.wait(PATIENCE_SECONDS)
    assert database.select(NUMBERS) == [], "nothing is committed"
    may_end.set()
    thread.join()
    assert seen == [1], "a block sees what it has changed"
    assert [number for (number,) in database.select(NUMBERS)] == [1]
    database.close()


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    database = open_server_database(tmp_path)
    with pytest.raises(KeyError), database.changes("a test") as connection:
        connection.execute(ADD, ("first",))
        raise KeyError
    assert database.select(NUMBERS) == []
    with database.changes("a test") as outer, database.changes("a part of it"):
        outer.execute(ADD, ("second",))
    assert len(database.select(NUMBERS)) == 1
    database.close()


def test_a_temporary_database_is_read_and_changed(tmp_path: Path) -> None:
    database = open_server_database(None)
    with database.changes("a test") as connection:
        connection.execute(ADD, ("first",))
    assert len(database.select(NUMBERS)) == 1
    database.close()


@pytest.mark.parametrize("default", ["ON", "OFF"])
def test_overwriting_leaves_the_builds_setting(default: str, tmp_path: Path) -> None:
    database = open_server_database(tmp_path)
    connection = database.connection
    connection.execute(f"PRAGMA secure_delete={default}")
    connection.execute(ADD, ("a secret job",))
    with overwriting(connection):
        connection.execute("DELETE FROM jobs")
    assert connection.execute("PRAGMA secure_delete").fetchone()[0] == int(default == "ON")
    files = (tmp_path / ".server").iterdir()
    assert not any(b"a secret job" in file.read_bytes() for file in files)
    database.close()
