"""vLLM as a supervised child process, its loaded adapters, and the pause gate."""
