"""Files on disk: models, checkpoints, trajectories, history. A write is completed or has no effect."""
