"""Names that programs written for ART import from here."""

from art.data import DatasetBatch
from art.utils.get_model_step import get_model_step
from art.utils.iterate_dataset import iterate_dataset
from art.utils.limit_concurrency import limit_concurrency
from art.utils.retry import retry
from art.utils.strip_logprobs import strip_logprobs

__all__ = [
    "DatasetBatch",
    "get_model_step",
    "iterate_dataset",
    "limit_concurrency",
    "retry",
    "strip_logprobs",
]
