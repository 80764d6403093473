"""Runs in the trainer's process: optimizer steps from resolved token rows to a PEFT folder."""
