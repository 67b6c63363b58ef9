"""Builders of the CUDA kernels, one module an op of DeepSpeed's."""
