"""Code inside vLLM's processes: its API server with a wrapped engine client, and the plugin that each process loads."""
