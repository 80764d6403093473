"""The commands, as processes."""

import json
import subprocess
import sys

MISSING = "import sys; sys.modules.update(dict.fromkeys(['ruamel', 'ruamel.yaml', 'matplotlib'])); "


def test_other_commands_need_none_of_its_packages() -> None:
    code = MISSING + "from art_watch.terminal.cli import main; main(['runs', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_its_packages_the_extra_is_named() -> None:
    code = MISSING + "from art_watch.terminal.cli import main; main(['finetune', 'x.yml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "agent-reinforcement-trainer[finetune]" in done.stderr


def test_the_schema_has_all_sections() -> None:
    command = [sys.executable, "-m", "art_watch.terminal.cli"]
    code = "from art_watch.terminal.cli import main; main(['finetune', '--schema'])"
    done = subprocess.run([*command[:1], "-c", code], capture_output=True, text=True, check=True)
    schema = json.loads(done.stdout)
    assert {"llms", "workflow", "eval", "finetuning"} <= schema["properties"].keys()


def test_a_wrong_file_ends_with_2_and_its_place(tmp_path) -> None:
    (tmp_path / "wrong.yml").write_text("workflow:\n  _type: agent.py:answer\nfinetunning: {}\n")
    code = "from art_watch.terminal.cli import main; main(['finetune', 'wrong.yml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and "wrong.yml:3:1: finetunning" in done.stderr and "Traceback" not in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["wrong.yml"]
