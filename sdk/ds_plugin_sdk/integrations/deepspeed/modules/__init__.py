"""What DeepSpeed calls on each op: one module for each op name, with exactly the functions of DeepSpeed's own.

DeepSpeed's front ends (`DeepSpeedCPUAdam`, `FusedAdam` ...) load an op by its builder and call these functions
positionally. Each calls the torch op of its family, native or reference, and keeps nothing but what the
contract keeps between calls. `ds_plugin_sdk.op_builder.op_table` says which op has which module.
"""
