"""A coding agent in sixty lines, without libraries: each answer of the model is a command, which a shell runs in the task's folder.

    python3 agent.py INSTRUCTION

The agent ends when the model says "done", when a command is none that a shell knows twice in a row, or after AGENT_TURNS answers.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

TURNS = int(os.environ.get("AGENT_TURNS", "8"))
MAX_OUTPUT = 2000
"""Characters of a command's output that the model reads."""
TRIES, WAIT_SECONDS = 40, 3.0
NOT_A_COMMAND = 127


def ask(messages):
    """The model's answer. A server that is away for two minutes is waited for."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 64}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    for trial in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=1200) as reply:
                return json.load(reply)["choices"][0]["message"]["content"] or ""
        except (OSError, urllib.error.HTTPError) as error:
            is_refused = isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 403, 404)
            if is_refused or trial == TRIES - 1:
                raise
            time.sleep(WAIT_SECONDS)
    raise AssertionError("the last try returns or raises")


def run(command):
    """The exit code of a command, and what the command printed."""
    try:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        return 124, "the command took longer than a minute"
    return done.returncode, (done.stdout + done.stderr)[-MAX_OUTPUT:]


def main():
    messages = [{"role": "user", "content": sys.argv[1]}]
    num_unknown = 0
    for _ in range(TURNS):
        answer = ask(messages)
        command = answer.strip().strip("`.!\"'")
        if command.lower() == "done":
            break
        code, output = run(command)
        print(f"$ {command}\n{output}", flush=True)
        num_unknown = num_unknown + 1 if code == NOT_A_COMMAND else 0
        if num_unknown == 2:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{code}\n{output}"}]


main()
