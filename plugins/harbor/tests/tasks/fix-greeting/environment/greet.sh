#!/bin/sh
echo "Hullo, $1"
