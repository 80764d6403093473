#!/bin/bash
[ "$(cat sum.txt)" = 42 ]
echo $((1 - $?)) > /logs/verifier/reward.txt
