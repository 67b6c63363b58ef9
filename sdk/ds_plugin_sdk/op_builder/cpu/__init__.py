"""The SDK's own builders: ops on host tensors, for every accelerator.

DeepSpeed scans this package for builders where a plugin brings none.
"""
