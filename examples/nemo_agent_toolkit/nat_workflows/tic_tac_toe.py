"""A workflow that plays tic-tac-toe against a random player, and the evaluator that rewards it by position value."""

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
from tic_tac_toe_rules import after_move, free_cells, result, to_move

from nat_workflows import game
from nat_workflows.evaluating import evaluator_info


class TicTacToeConfig(FunctionBaseConfig, name="art_tic_tac_toe"):
    llm: LLMRef


class PositionValueConfig(EvaluatorBaseConfig, name="art_position_value"):
    pass


@register_function(config_type=TicTacToeConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def play_row(row: str) -> str:
        return await play(llm, *game.start(row))

    yield FunctionInfo.from_fn(play_row, description="Play tic-tac-toe against a random player.")


async def play(llm: BaseChatModel, symbol: str, board: str) -> str:
    """One game, which is one conversation, as `game.score` reads it. An illegal answer ends the game."""
    messages: list[BaseMessage] = [SystemMessage(game.SYSTEM)]
    played = [symbol]
    while result(board, symbol) is None:
        if to_move(board) != symbol:
            board = after_move(board, random.choice(free_cells(board)))
            continue
        messages.append(HumanMessage(game.question(board)))
        messages.append(await llm.ainvoke(messages))
        move = game.parse_move(str(messages[-1].content), board)
        if move is None:
            return " ".join([*played, game.ILLEGAL])
        board = after_move(board, move)
        played.append(board)
    return " ".join(played)


@register_evaluator(config_type=PositionValueConfig)
async def position_value(config: PositionValueConfig, _builder: EvalBuilder) -> AsyncIterator[EvaluatorInfo]:
    yield evaluator_info(config, score_row)


def score_row(item: EvalInputItem) -> float:
    """The mean worth of the positions that the model moved to."""
    return game.score(str(item.output_obj))
