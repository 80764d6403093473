"""The calls of vLLM in docs/howto/serve-elsewhere.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from art_server.store.base_models import TINY_DIR
from tests.dockerfiles import free_port
from tests.pages import blocks, commands
from tests.waiting import wait_until

VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.loads(sys.argv[1]):
    make_arg_parser(FlexibleArgumentParser()).parse_args(words)
"""


def test_vllm_has_the_flags() -> None:
    calls = commands("serve-elsewhere.md", "vllm")
    assert {words.pop(0) for words in calls} == {"serve"}
    command = [sys.executable, "-c", VLLM, json.dumps(calls)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-1000:]


def test_vllm_on_a_cpu_serves_the_merged_folder(tmp_path: Path) -> None:
    """The line as it stands, but for its port."""
    (block,) = [text for text in blocks("serve-elsewhere.md", "bash") if "python -m vllm" in text]
    (tmp_path / "agent-merged").symlink_to(TINY_DIR)
    port = free_port()
    line, replaced = re.subn(r"--port \d+", f"--port {port}", block)
    assert replaced == 1
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    log = tmp_path / "vllm.log"
    with log.open("wb") as file:
        vllm = subprocess.Popen(
            ["sh", "-c", f"exec env {line}"],
            cwd=tmp_path,
            env={**os.environ, "PATH": search},
            stdout=file,
            stderr=file,
        )
    try:
        wait_until(lambda: answers(port) or vllm.poll() is not None, lambda: log.read_text()[-3000:])
        body = {
            "model": "agent",
            "messages": [{"role": "user", "content": "respond with yes, no, maybe"}],
            "max_tokens": 8,
        }
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=None)
        assert answer.json()["choices"][0]["message"]["content"], answer.text
    finally:
        vllm.terminate()
        vllm.wait()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
