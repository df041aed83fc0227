"""Tests on a GPU: kernels are compiled, so this folder is run by itself, ``pytest tests/gpu``."""
