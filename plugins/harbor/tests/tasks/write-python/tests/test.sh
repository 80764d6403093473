#!/bin/bash
python3 /tests/checks.py
