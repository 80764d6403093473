#!/bin/bash
points=0
[ "$(cat answer.txt)" = instruction ] && points=$((points + 1))
[ "$(cat length.txt)" = 11 ] && points=$((points + 1))
awk "BEGIN { print $points / 2 }" > /logs/verifier/reward.txt
