"""Compatibility with programs written for ART and with NVIDIA's plugin. The public names are importable from `art`."""
