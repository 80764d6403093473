"""What `on_step` receives."""

from art_protocol.tracking import RolloutRow, StepRecord

__all__ = ["RolloutRow", "StepRecord"]
