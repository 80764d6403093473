"""The coding agents: how each is installed, and how each gets a rollout's URL, key and model.

Each agent is the program that its makers publish, with the pinned version, in a folder of its own under .build/agents. The settings are
documented settings of the agent. docs/howto/coding-agents.md has the same settings for users.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.long.coding_agents.scripted_proxy import Exchange, Policy, num_tool_results

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".build" / "agents"
TASK = "List the files, then write the word hello into hello.txt."
COMMANDS = ("ls", "echo hello > hello.txt")
CONTEXT, MAX_TOKENS = 65_536, 1_000


@dataclass(frozen=True)
class Access:
    """What an agent's process gets."""

    base_url: str
    root_url: str
    """For Anthropic's clients: `base_url` without /v1."""
    key: str
    model: str
    base_model: str
    home: Path
    work: Path


@dataclass(frozen=True)
class Agent:
    name: str
    package: str
    """On npm, or on PyPI if `executable` is in `bin`."""
    executable: str
    """Under the agent's folder."""
    command: Callable[[Access], list[str]]
    """Arguments of the executable."""
    environment: Callable[[Access], dict[str, str]]
    answer: Policy
    """The scripted policy."""
    settings: Callable[[Access], dict[str, str]] = lambda _: {}
    """Files by their path under the home."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters of the session, for what the agent cannot set."""
    has_tools: bool = True
    """Whether the agent names its tools in requests. If not, its calls are texts, and no request is a side call."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name.partition("-with-")[0]

    def kind_of(self, exchange: Exchange) -> str:
        """`main`, `side`, or a method and a path."""
        return "main" if exchange.kind == "side" and not self.has_tools else exchange.kind

    def install(self) -> None:
        """Raises subprocess.CalledProcessError if the registry does not answer."""
        stamp = self.folder / "installed"
        if stamp.exists() and stamp.read_text() == self.package:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.executable.startswith("bin/"):
            run(ROOT / "scripts" / "uv", "venv", "--quiet", self.folder, cwd=ROOT)
            run(
                ROOT / "scripts" / "uv",
                "pip",
                "install",
                "--quiet",
                "--python",
                self.folder / "bin" / "python",
                self.package,
                cwd=ROOT,
            )
        else:
            run(
                "npm",
                "install",
                "--prefix",
                self.folder,
                "--no-audit",
                "--no-fund",
                "--loglevel=error",
                self.package,
                cwd=self.folder,
            )
        stamp.write_text(self.package)


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def by_tools(shell: Callable[[str], Any], *, end: str = "Done.", commands: Sequence[str] = COMMANDS) -> Policy:
    """A policy that calls an agent's shell tool with one command after the other, and then answers with `end`. `shell` gives the
    call's name and arguments for a command. Requests without tools get a short text."""

    def answer(body: dict[str, Any]) -> str:
        if not body.get("tools"):
            return "A hello file"
        turn = num_tool_results(body)
        return json.dumps([shell(commands[turn])]) if turn < len(commands) else end

    return answer


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


def described(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda command: {"name": name, "arguments": {"command": command, "description": "works on the task"}}


def bin_of(program: str) -> str:
    return f"node_modules/.bin/{program}"


# --- pi ---


def pi_settings(access: Access) -> dict[str, str]:
    model = {"id": access.model, "contextWindow": CONTEXT, "maxTokens": MAX_TOKENS}
    provider = {"baseUrl": access.base_url, "apiKey": access.key, "api": "openai-completions", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"art": provider}})}


PI = Agent(
    name="pi",
    package="@mariozechner/pi-coding-agent@0.73.1",
    executable=bin_of("pi"),
    command=lambda access: ["--print", "--no-session", "--provider", "art", "--model", access.model, TASK],
    environment=lambda _: {"PI_OFFLINE": "1"},
    answer=by_tools(bash),
    settings=pi_settings,
)

# --- opencode ---


def opencode_settings(access: Access) -> dict[str, str]:
    limit = {"context": CONTEXT, "output": MAX_TOKENS}
    models = {"policy": {"id": access.model, "limit": limit}, "base": {"id": access.base_model, "limit": limit}}
    options = {"baseURL": access.base_url, "apiKey": access.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "ART", "options": options, "models": models}
    config = {"provider": {"art": provider}, "model": "art/policy", "autoupdate": False, "share": "disabled"}
    config |= {"small_model": "art/base"}  # which writes the title: the base model is not trained
    return {".config/opencode/opencode.json": json.dumps(config)}


OPENCODE = Agent(
    name="opencode",
    package="opencode-ai@1.18.33",
    executable=bin_of("opencode"),
    command=lambda _: ["run", "--model", "art/policy", TASK],
    environment=lambda _: {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    },
    settings=opencode_settings,
    answer=by_tools(described("bash")),
)

# --- Claude Code ---


def claude_environment(access: Access) -> dict[str, str]:
    names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"]
    names += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")]
    return {
        "ANTHROPIC_BASE_URL": access.root_url,
        "ANTHROPIC_API_KEY": access.key,
        **dict.fromkeys(names, access.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MAX_TOKENS),
        "MAX_THINKING_TOKENS": "0",
        "CLAUDE_CODE_EFFORT_LEVEL": "unset",
    }


CLAUDE_CODE = Agent(
    name="claude-code",
    package="@anthropic-ai/claude-code@2.1.197",
    executable=bin_of("claude"),
    command=lambda _: ["--print", "--allowedTools", "Bash", "--", TASK],
    environment=claude_environment,
    answer=by_tools(described("Bash")),
)
CLAUDE_CODE_FOUR = replace(
    CLAUDE_CODE,
    name="claude-code-with-four-tools",
    command=lambda _: ["--print", "--tools", "Bash,Edit,Read,Write", "--allowedTools", "Bash", "--", TASK],
)

# --- Codex ---


def codex_settings(access: Access) -> dict[str, str]:
    config = f"""
model = "{access.model}"
model_provider = "art"
model_context_window = {CONTEXT}
web_search = "disabled"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.art]
name = "ART"
base_url = "{access.base_url}"
env_key = "ART_API_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": config}


CODEX = Agent(
    name="codex",
    package="@openai/codex@0.171.0",
    executable=bin_of("codex"),
    command=lambda _: ["exec", "--skip-git-repo-check", TASK],
    environment=lambda access: {"ART_API_KEY": access.key, "CODEX_HOME": str(access.home / ".codex")},
    settings=codex_settings,
    answer=by_tools(lambda command: {"name": "exec_command", "arguments": {"cmd": command}}),
    sampling={"max_tokens": MAX_TOKENS},
)

# --- qwen-code ---


def qwen_settings(_: Access) -> dict[str, str]:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def openai_environment(access: Access) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.key,
        "OPENAI_MODEL": access.model,
    }


QWEN_CODE = Agent(
    name="qwen-code",
    package="@qwen-code/qwen-code@0.24.4",
    executable=bin_of("qwen"),
    command=lambda _: ["--yolo", TASK],
    environment=lambda access: {**openai_environment(access), "QWEN_CODE_MAX_OUTPUT_TOKENS": str(MAX_TOKENS)},
    settings=qwen_settings,
    answer=by_tools(
        lambda command: {"name": "run_shell_command", "arguments": {"command": command, "is_background": False}}
    ),
)
QWEN_CODE_BARE = replace(QWEN_CODE, name="qwen-code-with-bare-mode", command=lambda _: ["--bare", "--yolo", TASK])

# --- mini-swe-agent ---

MINI = Agent(
    name="mini-swe-agent",
    package="mini-swe-agent==2.4.6",
    executable="bin/mini",
    command=lambda access: [
        *("--model", f"openai/{access.model}", "--task", TASK, "--yolo", "--exit-immediately"),
        *("--config", "mini.yaml", "--config", f"model.model_kwargs.max_tokens={MAX_TOKENS}"),
    ],
    environment=lambda access: {
        **openai_environment(access),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    answer=by_tools(bash, commands=[*COMMANDS, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]),
)

# --- aider ---


def aider_answer(body: dict[str, Any]) -> str:
    """A file with a wrong word, then the right file: aider asks again, because its test fails."""
    word = "hello" if "hullo" in json.dumps(body) else "hullo"
    return f"hello.txt\n```\n{word}\n```\n"


AIDER = Agent(
    name="aider",
    package="aider-chat==0.86.2",
    executable="bin/aider",
    command=lambda access: [
        *("--model", f"openai/{access.model}", "--message", TASK, "--yes-always", "--no-git", "--edit-format", "whole"),
        *("--test-cmd", "grep hello hello.txt", "--auto-test", "--no-check-update", "--analytics-disable"),
        *("--no-show-model-warnings", "--no-detect-urls", "hello.txt"),
    ],
    environment=lambda access: {**openai_environment(access), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    answer=aider_answer,
    sampling={"max_tokens": MAX_TOKENS, "temperature": 1},
    has_tools=False,
)

# --- claude-agent-sdk ---

SDK_PROGRAM = """
import asyncio, sys
from claude_agent_sdk import ClaudeAgentOptions, query

async def main():
    options = ClaudeAgentOptions(tools=["Bash", "Edit", "Read", "Write"], allowed_tools=["Bash"], setting_sources=[])
    async for message in query(prompt=sys.argv[1], options=options):
        print(message)

asyncio.run(main())
"""
CLAUDE_AGENT_SDK = Agent(
    name="claude-agent-sdk",
    package="claude-agent-sdk==0.2.189",
    executable="bin/python",
    command=lambda access: [str(access.home / "agent.py"), TASK],
    environment=claude_environment,
    settings=lambda _: {"agent.py": SDK_PROGRAM},
    answer=by_tools(described("Bash")),
)

AGENTS = {
    agent.name: agent
    for agent in (
        *(PI, OPENCODE, CLAUDE_CODE_FOUR, CLAUDE_CODE, CODEX),
        *(QWEN_CODE_BARE, QWEN_CODE, MINI, AIDER, CLAUDE_AGENT_SDK),
    )
}
