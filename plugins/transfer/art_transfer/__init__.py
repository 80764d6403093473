"""Checkpoints to and from other places: `art export`, `art import`, `art copy`."""
