#!/bin/bash
# Both files: reward.json is read first.
echo 7 > /logs/verifier/reward.txt
[ "$(tr -d ' ' < count.txt)" = 3 ]
echo "{\"lines\": $((1 - $?))}" > /logs/verifier/reward.json
