"""What programs written for ART and for NVIDIA's plugin use: their names stay importable from `art`."""
