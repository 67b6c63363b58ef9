"""The layer below this SDK: thousands of torch ops on the device. It is torch's to define, and torch has tests for it.

    python -m ds_plugin_sdk.conformance.torch_layer zap                      torch's OpInfo samples, against the CPU
    python -m ds_plugin_sdk.conformance.torch_layer zap pytorch/test/test_torch.py -v     a test file of torch itself

Nothing here says what torch shall compute: samples, tolerances and known exceptions are those of the installed torch.
"""
