"""Ray: the process beside the server that has Ray place hosts (`--cluster`)."""
