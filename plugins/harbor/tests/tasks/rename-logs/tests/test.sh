#!/bin/bash
[ "$(cd logs && echo *)" = "a$SUFFIX b$SUFFIX c.md" ]
echo "{\"reward\": $((1 - $?))}" > /logs/verifier/reward.json
