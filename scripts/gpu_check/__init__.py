"""The checks of `scripts/gpu-check`, a file for each."""
