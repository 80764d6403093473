"""What people see of runs: a reader of the server's folder, the page, the metrics and the command `art`."""
