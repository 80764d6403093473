#!/bin/bash
# The agent's time is over by now, and its loop with it.
before=$(grep -c tick ticks.txt); sleep 0.5
[ "${before:-0}" -gt 3 ] && [ "$(grep -c tick ticks.txt)" = "$before" ]
echo $((1 - $?)) > /logs/verifier/reward.txt
