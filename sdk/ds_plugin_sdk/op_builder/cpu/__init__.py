"""The SDK's own builders: ops on CPU tensors, for every accelerator. DeepSpeed searches this package where a plugin
brings no builders.
"""
