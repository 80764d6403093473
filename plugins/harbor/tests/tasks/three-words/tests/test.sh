#!/bin/bash
# A part for each file; the reward is 1 only if all three are right.
[ "$(cat 1)" = one ]; one=$((1 - $?))
[ "$(cat 2)" = two ]; two=$((1 - $?))
[ "$(cat 3)" = three ]; three=$((1 - $?))
echo "{\"reward\": $((one * two * three)), \"one\": $one, \"two\": $two, \"three\": $three}" > /logs/verifier/reward.json
