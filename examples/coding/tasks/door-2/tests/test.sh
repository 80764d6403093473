#!/bin/bash
PATH=/usr/bin:/bin # not the programs of the folder, which the agent may have changed
if grep -qx 'WORD = "maybe"' /work/door.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
