"""Runs in the trainer's process: optimizer steps, from resolved token sequences to a PEFT folder."""
