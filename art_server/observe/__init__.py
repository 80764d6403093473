"""What people see of runs: a reader of the server's folder, what the server does now, the page and the terminal."""
