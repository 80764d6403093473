while true; do echo tick >> ticks.txt; sleep 0.1; done
