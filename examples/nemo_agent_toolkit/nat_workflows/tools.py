"""A workflow that answers questions with LangChain tools, and the evaluator that rewards right answers.

A row has the question of a user and the result of the right tool: "What is 12 plus 30?", "42".
"""

from collections.abc import AsyncIterator

from langchain.agents import create_agent
from langgraph.errors import GraphRecursionError
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig

from nat_workflows.evaluating import evaluator_info

MAX_NODES = 9
"""The most nodes of the agent's graph that run: four calls of the model and their tools. A longer run is stopped."""


class ToolsConfig(FunctionBaseConfig, name="art_tools"):
    llm: LLMRef


class RightAnswerConfig(EvaluatorBaseConfig, name="art_right_answer"):
    pass


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{('sunny', 'cloudy', 'windy', 'foggy')[len(city) % 4]}, {sum(map(ord, city)) % 30} degrees"


@register_function(config_type=ToolsConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def tools(config: ToolsConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    agent = create_agent(llm, tools=[add, get_weather])

    async def answer(question: str) -> str:
        try:
            state = await agent.ainvoke(
                {"messages": [{"role": "user", "content": question}]},
                {"recursion_limit": MAX_NODES},
            )
        except GraphRecursionError:  # if raised, the exception would end the rows that have not begun
            return ""
        return state["messages"][-1].text

    yield FunctionInfo.from_fn(answer, description="Answer a question with tools.")


@register_evaluator(config_type=RightAnswerConfig)
async def right_answer(config: RightAnswerConfig, _builder: EvalBuilder) -> AsyncIterator[EvaluatorInfo]:
    yield evaluator_info(config, score_row)


def score_row(item: EvalInputItem) -> float:
    """1 for an answer that contains the tool's result, less 0.05 for each word of the answer."""
    words = str(item.output_obj).split()
    return float(str(item.expected_output_obj) in str(item.output_obj)) - 0.05 * len(words)
