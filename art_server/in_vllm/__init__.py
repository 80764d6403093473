"""Runs inside vLLM's processes: its API server with our seam, and the plugin that each of them loads."""
