"""The trainer: one optimizer step from resolved token rows to a PEFT folder, in a process of its own."""
