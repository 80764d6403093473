"""vLLM: its process with the wrapped engine client, the adapters that it has loaded, and the gate before it."""
