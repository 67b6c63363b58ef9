"""Builders of the CUDA kernels."""
