"""The SDK's torch ops: one module or package a family, in torch's namespace ``ds_plugin``.

Importing ``ds_plugin_sdk.ops.<family>`` defines the family's ops: schema, reference in plain torch for every device,
and fake kernel for tracing. A device's native kernel, loaded later, takes over from the reference by torch's own rules.
Importing this package imports nothing.
"""
