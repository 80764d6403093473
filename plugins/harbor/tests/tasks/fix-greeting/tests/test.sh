#!/bin/bash
passed=0 all=0
check() { # ARGUMENT... = EXPECTED
  local expected="${*: -1}"
  all=$((all + 1))
  [ "$(sh greet.sh "${@:1:$#-1}")" = "$expected" ] && passed=$((passed + 1)) || echo "failed: $expected"
}
check Ada "Hello, Ada!"
check "Ada Lovelace" "Hello, Ada Lovelace!"
check "Hello, world!"
awk "BEGIN { print $passed / $all }" > /logs/verifier/reward.txt
[ "$passed" = "$all" ]
