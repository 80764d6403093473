"""Checkpoints as things: list, fork, roll back, delete, import, export, copy."""
