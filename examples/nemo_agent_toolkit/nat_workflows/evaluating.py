"""An evaluator of NeMo Agent Toolkit from one function."""

from collections.abc import Callable

from nat.builder.evaluator import EvaluatorInfo
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class _FunctionEvaluator(BaseEvaluator):
    def __init__(self, score: Callable[[EvalInputItem], float]) -> None:
        super().__init__()
        self._score = score

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=self._score(item), reasoning=item.output_obj)


def evaluator_info(
    config: EvaluatorBaseConfig, score: Callable[[EvalInputItem], float]
) -> EvaluatorInfo:
    """What a function registered as an evaluator yields; the rewards are `score` of each row."""
    evaluator = _FunctionEvaluator(score)
    return EvaluatorInfo(
        config=config, evaluate_fn=evaluator.evaluate, description=score.__doc__ or ""
    )
