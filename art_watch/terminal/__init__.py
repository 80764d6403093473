"""The commands of `art` that show runs in a terminal: status, runs, show, plot, jobs."""
