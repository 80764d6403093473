"""What `on_step` receives, and the trackers' names."""

from art_trackers import RolloutRow, StepRecord, TrackerName

__all__ = ["RolloutRow", "StepRecord", "TrackerName"]
