"""The history of a model that no server keeps."""

from pathlib import Path

import art
from art_compat import offline_log


def test_lines_that_a_crash_cut_short_are_left_out(tmp_path: Path) -> None:
    row = b'{"step": 1, "costs/cum/all": 2.5}\n'
    (tmp_path / "history.jsonl").write_bytes(row + b"\xff\n" + b'{"step": 2, "costs/cu')
    assert offline_log.sums(tmp_path) == {"costs/cum/all": 2.5}
    offline_log.log(tmp_path, [art.Trajectory(reward=1.0)], "val", {}, 2)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2
