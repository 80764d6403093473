"""The OpenAI-compatible routes: one inference request to the engine, and its answer back."""
