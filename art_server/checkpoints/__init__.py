"""Checkpoints: list, fork, roll back, delete, upload, import, export, copy."""
