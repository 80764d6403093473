"""A workflow that plays tic-tac-toe against a random player, and the evaluator that rewards it.

A row's question is the model's symbol, and the moves made before: "x", or "o B2". The workflow's output is
the whole game, "x B2 A1 C3", with "illegal" behind it when the model's answer ended it.
"""

import random
from collections.abc import AsyncIterator

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig

from nat_workflows import game
from nat_workflows.evaluating import evaluator_info


class TicTacToeConfig(FunctionBaseConfig, name="art_tic_tac_toe"):
    llm: LLMRef


class PositionValueConfig(EvaluatorBaseConfig, name="art_position_value"):
    pass


@register_function(config_type=TicTacToeConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def play_row(question: str) -> str:
        symbol, *moves = question.split()
        return await play(llm, symbol, tuple(moves))

    yield FunctionInfo.from_fn(play_row, description="Play tic-tac-toe against a random player.")


async def play(llm: BaseChatModel, symbol: str, moves: game.Game) -> str:
    """One game, which is one conversation; an illegal answer ends it."""
    messages: list[BaseMessage] = [SystemMessage(game.SYSTEM)]
    while not game.is_over(moves):
        if "xo"[len(moves) % 2] != symbol:
            moves += (random.choice(game.free_cells(moves)),)
            continue
        messages.append(HumanMessage(game.show(moves)))
        messages.append(await llm.ainvoke(messages))
        move = game.parse_move(str(messages[-1].content), moves)
        if move is None:
            return " ".join([symbol, *moves, "illegal"])
        moves += (move,)
    return " ".join([symbol, *moves])


@register_evaluator(config_type=PositionValueConfig)
async def position_value(
    config: PositionValueConfig, _builder: EvalBuilder
) -> AsyncIterator[EvaluatorInfo]:
    yield evaluator_info(config, score_row)


def score_row(item: EvalInputItem) -> float:
    """The mean worth of the positions that the model moved to."""
    symbol, *moves = str(item.output_obj).split()
    is_illegal = moves[-1:] == ["illegal"]
    return game.score(tuple(moves[:-1] if is_illegal else moves), symbol, is_illegal)
