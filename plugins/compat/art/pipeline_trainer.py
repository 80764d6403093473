"""ART's path of names that are refused here."""

from art.compat.refused import PipelineTrainer, make_group_rollout_fn

__all__ = ["PipelineTrainer", "make_group_rollout_fn"]
