"""The server's processes and tasks: children, background tasks, what the start shows, and where a process runs."""
