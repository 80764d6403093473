"""An evaluator of NeMo Agent Toolkit from one function."""

import statistics
from collections.abc import Callable

from nat.builder.evaluator import EvaluatorInfo
from nat.data_models.evaluator import EvalInput, EvalInputItem, EvaluatorBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem


def evaluator_info(config: EvaluatorBaseConfig, score: Callable[[EvalInputItem], float]) -> EvaluatorInfo:
    """The value that a function registered as an evaluator has to yield. The rewards are `score` of each row."""

    async def evaluate(rows: EvalInput) -> EvalOutput:
        scores = {row.id: score(row) for row in rows.eval_input_items}
        items = [EvalOutputItem(id=id, score=score, reasoning="") for id, score in scores.items()]
        return EvalOutput(average_score=statistics.fmean(scores.values()), eval_output_items=items)

    return EvaluatorInfo(config=config, evaluate_fn=evaluate, description=score.__doc__ or "")
