#!/bin/bash
if [ "$(python3 /work/door.py)" = open ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
