"""What was learned of memory is on disk, whole, and survives what people and other gangs do to it."""

import threading
from pathlib import Path

from art_server.jobs.budgets import Budgets


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "new" / "budgets.json"
    assert Budgets(file).read() == {}
    Budgets(file).learn("CPU", 512)
    Budgets(file).learn("GPU", 64)
    assert Budgets(file).read() == {"CPU": 512, "GPU": 64}
    file.unlink()
    assert Budgets(file).read() == {}, "a user wants larger ones"


def test_gangs_that_learn_at_once_lose_nothing(tmp_path: Path) -> None:
    budgets = Budgets(tmp_path / "budgets.json")
    threads = [threading.Thread(target=budgets.learn, args=(f"{n % 8}", 100 + n)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budgets.read() == {f"{n}": 100 + n for n in range(8)}, "the smallest of each key"


def test_a_file_that_was_edited_to_something_else_is_learned_anew(tmp_path: Path) -> None:
    file = tmp_path / "budgets.json"
    for content in ("", "[]", '{"CPU": "many"}'):
        file.write_text(content)
        assert Budgets(file).read() == {}
    Budgets(file).learn("CPU", 512)
    assert Budgets(file).read() == {"CPU": 512}
