"""Every op by DeepSpeed's name, a row each. All that has to know the names of ops reads this table.

DeepSpeed asks for an op by the name of a builder class, and several of its ops may be one family of the SDK's: its
``cpu_adam`` and ``fused_adam`` are both Adam. A new name of DeepSpeed's is a new row, and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        builder: name of its builder class.
        name: the op's name: the builder's ``NAME``.
        families: modules of `ds_plugin_sdk.ops` that it is made of; empty if the SDK does not implement it.
        kernels: whether the SDK has kernels for CPU tensors, ``kernels/cpu/<family>.cpp``, and not only a reference
            implementation.
        host: whether it has a library, ``kernels/host/<family>.cpp``, that works on host memory whatever the
            accelerator is: one library serves all devices.
        deepspeed: whether DeepSpeed asks for it. The others are families that DeepSpeed knows as parts of an op only.
        torch: whether the reference implementation is torch's own function, or the system's, which no kernel is
            faster than.
        optional: a collective that DeepSpeed accepts None for instead of a builder.
    """

    builder: str
    name: str
    families: tuple[str, ...] = ()
    kernels: bool = False
    host: bool = False
    deepspeed: bool = True
    torch: bool = False
    optional: bool = False

    @property
    def family(self) -> str | None:
        """The one family whose library the op is, or None."""
        return self.families[0] if len(self.families) == 1 else None

    @property
    def functions(self) -> str | None:
        """Dotted name of the module with the functions that DeepSpeed calls on the op, or None."""
        known = self.deepspeed and bool(self.families)
        return f"ds_plugin_sdk.integrations.deepspeed.modules.{self.name}" if known else None

    @property
    def cpu_only(self) -> bool:
        """Whether the op is for CPU tensors whatever the accelerator is: DeepSpeed says so by the builder's name."""
        return self.builder.startswith("CPU")


def _family(builder: str, name: str, *, kernels: bool = True) -> Op:
    """A family under its own name."""
    return Op(builder, name, (name,), kernels=kernels, deepspeed=False)


_INFERENCE = ("norm", "softmax", "activation", "rotary", "residual", "attention", "linear")

OPS = (
    # Optimizers.
    Op("CPUAdagradBuilder", "cpu_adagrad", ("adagrad",), kernels=True),
    Op("CPUAdamBuilder", "cpu_adam", ("adam",), kernels=True),
    Op("CPULionBuilder", "cpu_lion", ("lion",), kernels=True),
    Op("FusedAdamBuilder", "fused_adam", ("adam",), kernels=True),
    Op("FusedLambBuilder", "fused_lamb", ("lamb",), kernels=True),
    Op("FusedLionBuilder", "fused_lion", ("lion",), kernels=True),
    Op("FusedAdagradBuilder", "fused_adagrad", ("adagrad",), kernels=True, deepspeed=False),
    # Training.
    Op("EvoformerAttnBuilder", "evoformer_attn", ("evoformer_attn",), kernels=True),
    Op("FPQuantizerBuilder", "fp_quantizer", ("fp_quantizer",), kernels=True),
    Op("QuantizerBuilder", "quantizer", ("quantizer",), kernels=True),
    Op("RandomLTDBuilder", "random_ltd", ("random_ltd",), kernels=True),
    Op("StochasticTransformerBuilder", "stochastic_transformer", ("transformer",), kernels=True),
    Op("TransformerBuilder", "transformer", ("transformer",), kernels=True),
    Op("UtilsBuilder", "utils", ("utils",), torch=True),
    # Inference.
    Op("InferenceBuilder", "transformer_inference", _INFERENCE),
    Op("InferenceCoreBuilder", "inference_core_ops", ("norm", "activation", "linear", "fp6")),
    Op("SpatialInferenceBuilder", "spatial_inference", ("spatial",), kernels=True),
    # On the host, whatever the device is: memory, files, and calls of several ops.
    Op("AsyncIOBuilder", "async_io", ("async_io",), host=True),
    Op("PinMemoryBuilder", "pin_memory", ("pin_memory",), torch=True),
    Op("DecoderLayerBuilder", "decoder_layer", ("decoder_layer",), host=True, deepspeed=False),
    # Parts of the above, and a collective that DeepSpeed is given in another way.
    _family("ActivationBuilder", "activation"),
    _family("AllReduceBuilder", "all_reduce"),
    _family("AttentionBuilder", "attention"),
    _family("CrossEntropyBuilder", "cross_entropy"),
    _family("FP6Builder", "fp6", kernels=False),
    _family("LinearBuilder", "linear"),
    _family("LinearCrossEntropyBuilder", "linear_cross_entropy", kernels=False),
    _family("MatmulBuilder", "matmul"),
    _family("NormBuilder", "norm"),
    _family("ResidualBuilder", "residual"),
    _family("RotaryBuilder", "rotary"),
    _family("SoftmaxBuilder", "softmax"),
    # Not implemented here: DeepSpeed's own serve, where it has one for the device.
    Op("CCLCommBuilder", "deepspeed_ccl_comm", optional=True),
    Op("DeepCompileBuilder", "dc"),
    Op("FlashAttentionBuilder", "flash_attn"),
    Op("GDSBuilder", "gds"),
    Op("InferenceCutlassBuilder", "cutlass_ops"),
    Op("RaggedOpsBuilder", "ragged_device_ops"),
    Op("RaggedUtilsBuilder", "ragged_ops"),
    Op("ShareMemCommBuilder", "deepspeed_shm_comm", optional=True),
    Op("SparseAttnBuilder", "sparse_attn"),
    # DeepSpeed's own stand-in for an op that a device lacks.
    Op("NotImplementedBuilder", "deepspeed_not_implemented", deepspeed=False),
)

_BY_BUILDER = {op.builder: op for op in OPS}
_BY_NAME = {op.name: op for op in OPS}


def by_builder(builder: str) -> Op:
    """The op of a builder class's name; for a name that is not in the table, one that is not implemented."""
    return _BY_BUILDER.get(builder) or Op(builder, _snake_case(builder.removesuffix("Builder")), deepspeed=False)


def by_name(name: str) -> Op | None:
    """The op of a name such as ``fused_adam``, or None for a vendor's own."""
    return _BY_NAME.get(name)


def family_of(name: str) -> str | None:
    """The family whose library an op is, or None: ``fused_adam`` -> ``adam``."""
    op = by_name(name)
    return None if op is None else op.family


def _snake_case(words: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()


__all__ = ["OPS", "Op", "by_builder", "by_name", "family_of"]
