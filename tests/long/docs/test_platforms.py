"""The client runs on Windows and macOS: here in processes without the modules and functions that these lack, and with
their `sys.platform`. (`os.name` stays: with another one pathlib would make paths of Windows.)"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

UNIX_ONLY = {
    "environments/art/environments/scorer.py": {"fork", "killpg", "setrlimit", "setsid", "SIGKILL"},
    "finetune/art/finetune/workflows.py": {"killpg", "SIGKILL"},
    "finetune/art_finetune/commands.py": {"SIGHUP"},
    "skypilot/art/skypilot/tunnel.py": {"killpg"},
}
"""Parts of the client that docs/howto/platforms.md names as Unix's own."""

OF_A_SERVER = {"art_cluster", "art_transfer"}
"""Annexes that run beside a server."""


@pytest.mark.parametrize(("system", "missing"), [("Windows", UNIX_ONLY), ("Darwin", {})])
def test_the_client_calls_nothing_that_a_system_lacks(system: str, missing: dict[str, set[str]]) -> None:
    """By the type checker, which knows what Python has on each system."""
    command = [str(Path(sys.prefix) / "bin" / "pyright"), "--pythonplatform", system, "--outputjson"]
    annexes = [folder for folder in ROOT.glob("plugins/*/art*") if folder.is_dir() and folder.name not in OF_A_SERVER]
    ran = subprocess.run([*command, "art_client", *annexes], cwd=ROOT, capture_output=True, text=True, check=False)
    reported: dict[str, set[str]] = {}
    for diagnostic in json.loads(ran.stdout)["generalDiagnostics"]:
        named = re.match(r'"(\w+)" is not a known attribute of module', diagnostic["message"])
        if named is not None:
            file = re.split(r"/art_client/|/plugins/", diagnostic["file"])[1]
            reported.setdefault(file, set()).add(named[1])
    assert reported == missing
