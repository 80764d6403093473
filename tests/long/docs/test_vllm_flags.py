"""The flags of vLLM in the pages are those of the installed vLLM."""

import json
import subprocess
import sys

import pytest

from tests.pages import commands

pytestmark = pytest.mark.anyio

VLLM = """
import art_server  # first, for torchvision
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
