"""vLLM as a supervised child process, the adapters that it has loaded, and the gate before it."""
