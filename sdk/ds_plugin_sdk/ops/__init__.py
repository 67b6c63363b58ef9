"""The SDK's torch ops: one module or package a family, in torch's namespace ``ds_plugin``.

Importing ``ds_plugin_sdk.ops.<family>`` defines the family's ops, each once, with `_library.op`: a schema, a check of
the arguments, outputs for tracing, and the reference implementation in plain torch, to which every device falls back.
A device's native kernel, loaded later, takes over by torch's own rules. `async_io` and `pin_memory`, on host memory and
files, have no torch ops. Importing this package imports nothing.
"""
