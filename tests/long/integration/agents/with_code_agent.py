"""smolagents' CodeAgent, which stops at the end of its code, and sends its answers back with that end and the call it made.

art/tiny writes calls as JSON and no Python, so the agent's code is between the tags of its calls, and `CallExecutor` runs
it. The agent ends after `STEPS` calls, because art/tiny calls no `final_answer`.
"""

import asyncio
import itertools
import json

import task
from smolagents import ActionStep, CodeAgent, LogLevel, OpenAIModel
from smolagents.local_python_executor import CodeOutput, PythonExecutor

import art

STEPS = 2
PROMPT = "Your tools:\n" + "\n".join(json.dumps({"type": "function", "function": schema}) for schema in task.SCHEMAS)


class CallExecutor(PythonExecutor):
    """Runs a call that is written as JSON."""

    def send_tools(self, tools: object) -> None: ...

    def send_variables(self, variables: object) -> None: ...

    def __call__(self, code: str) -> CodeOutput:
        call = json.loads(code)
        result = task.call_tool(call["name"], call["arguments"])
        return CodeOutput(output=result, logs="", is_final_answer=False)


def all_results(agent: CodeAgent, question: str) -> str:
    steps = (step for step in agent.run(question, stream=True) if isinstance(step, ActionStep))
    return " ".join(str(step.observations) for step in itertools.islice(steps, STEPS))


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAIModel(
        r.model.get_inference_name(), api_base=r.base_url, api_key=r.api_key, max_tokens=task.MAX_TOKENS
    )
    agent = CodeAgent(
        [],
        model,
        executor=CallExecutor(),
        code_block_tags=("<tool_call>", "</tool_call>"),
        verbosity_level=LogLevel.OFF,
    )
    agent.prompt_templates["system_prompt"] = PROMPT
    return await asyncio.to_thread(all_results, agent, question)
