"""Models of Hugging Face's transformers (5 and later) on the SDK's ops, without a line of model code.

    from ds_plugin_sdk.integrations.transformers import accelerate

    accelerate(model, weights="int8")
    model.generate(**inputs)

or, for a while only, ``with accelerate(model): ...``.

Attention goes through transformers' own registry, under the name ``ds_plugin``, which any model may be asked to use:
``model.set_attn_implementation("ds_plugin")``. Linear layers, norms and, for the models in `FAMILIES`, whole decoder
layers get another ``forward`` on the instance; no class is changed. ``print(accelerate(model))`` says which.
"""

from __future__ import annotations

from ds_plugin_sdk.errors import MissingLibraryError

try:
    from ds_plugin_sdk.integrations.transformers._accelerate import Accelerated, accelerate
    from ds_plugin_sdk.integrations.transformers.attention import ATTENTION, attention_forward, register_attention
    from ds_plugin_sdk.integrations.transformers.families import FAMILIES
except ImportError as missing:
    if not (missing.name or "").startswith("transformers"):
        raise
    raise MissingLibraryError(
        "models of transformers cannot run on the SDK's ops",
        why=str(missing),
        hint="transformers is missing or too old here: pip install 'transformers>=5'",
    ) from missing

__all__ = ["ATTENTION", "FAMILIES", "Accelerated", "accelerate", "attention_forward", "register_attention"]
