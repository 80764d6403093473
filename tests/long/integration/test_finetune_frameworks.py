"""`art finetune` without a file: an agent of a framework, the task of examples/cities.py, one command."""

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.live import Server

ROOT = Path(__file__).parents[3]
draw_question = runpy.run_path(str(ROOT / "examples" / "cities.py"))["draw_question"]
SCORE = """

def score(row, output):
    return float(row["answer"] in str(output))
"""
LANGGRAPH = (ROOT / "docs" / "finetune.md").read_text().split("```python\n# agent.py\n")[2].split(SCORE)[0]
PYDANTIC_AI = """
import os

import cities
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), tools=cities.TOOLS, model_settings={"max_tokens": 64})


async def answer(question):
    return (await agent.run(question)).output
"""
OPENAI_AGENTS = """
import os

import cities
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI())
tools = [function_tool(tool) for tool in cities.TOOLS]
agent = Agent(name="cities", model=model, tools=tools, model_settings=ModelSettings(max_tokens=64))


async def answer(question):
    return (await Runner.run(agent, question, max_turns=4)).final_output
"""
AGENTS = {"langgraph": LANGGRAPH, "pydantic_ai": PYDANTIC_AI, "openai_agents": OPENAI_AGENTS}


@pytest.fixture(scope="session")
def command() -> Path:
    """`art` of .venv-frameworks."""
    subprocess.run([ROOT / "scripts" / "setup-frameworks"], check=True)
    return ROOT / ".venv-frameworks" / "bin" / "art"


def write_rows(file: Path, seed: str, number: int) -> None:
    questions = [draw_question(f"{seed} {index}") for index in range(number)]
    rows = [{"id": f"{seed} {index}", "question": q.text, "answer": q.answer} for index, q in enumerate(questions)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", AGENTS)
def test_one_command_trains_an_agent_of_a_framework(server: Server, command: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "agent.py").write_text(AGENTS[name].strip() + "\n" + SCORE)
    assert len((tmp_path / "agent.py").read_text().splitlines()) <= 24
    shutil.copy(ROOT / "examples" / "cities.py", tmp_path)
    write_rows(tmp_path / "train.jsonl", name, 96)
    write_rows(tmp_path / "held_out.jsonl", f"held out {name}", 64)
    environment = os.environ | {"ART_SERVER_URL": server.url}

    def art(*arguments: str) -> str:
        done = subprocess.run([command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    flags = [
        "--num_epochs",
        "4",
        "--num_generations",
        "8",
        "--learning_rate",
        "1e-3",
        "-o",
        "finetuning.max_exceptions",
        "0.5",
    ]
    batches = ["-o", "trainer_adapters.adapter.training.batch_size", "16", "--output_dir", "out"]
    named = ["-o", "trainer_adapters.adapter.backend.name", name]
    art(
        "finetune",
        "agent.py:answer",
        "--dataset",
        "train.jsonl",
        "--reward",
        "agent.py:score",
        "--base_model",
        "art/tiny",
        *flags,
        *batches,
        *named,
    )
    print(art("eval", "out/config.yml", "--validation_dataset", "held_out.jsonl", "--baseline", "0"))
    figures = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert figures["difference"]["mean"] >= 0.25 and figures["difference"]["interval"][0] > 0
