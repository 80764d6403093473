"""Files: models, checkpoints, trajectories, history. Everything is written whole or not at all."""
