from pathlib import Path

from art_server.shared.main_memory import main_memory


def test_a_container_s_limit_is_the_main_memory(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/kubepods/pod/box\n")
    box = tmp_path / "fs" / "kubepods" / "pod" / "box"
    box.mkdir(parents=True)
    whole = main_memory(tmp_path / "fs", own)
    (box / "memory.max").write_text("max\n")
    assert main_memory(tmp_path / "fs", own) == whole
    (box.parent / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.max").write_text("1\n")  # above the root: no group
    assert main_memory(tmp_path / "fs", own) == 2**30
    own.write_text("4:memory:/docker\n1:cpu:/\n")
    (tmp_path / "fs" / "memory" / "docker").mkdir(parents=True)
    (tmp_path / "fs" / "memory" / "docker" / "memory.limit_in_bytes").write_text("536870912\n")
    assert main_memory(tmp_path / "fs", own) == 2**29
    assert main_memory(tmp_path / "fs", tmp_path / "none") == whole
