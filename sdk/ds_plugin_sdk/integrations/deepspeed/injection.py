"""Says what to do where DeepSpeed's kernel injection does not fit a model.

``init_inference(replace_with_kernel_inject=True)`` puts layers into the model that were written for the transformers of
their time, and so does the hybrid engine for inference between training steps. Where those have moved on, the layers
fail, on every device, before or between calls of kernels, with an `AttributeError` deep inside. The engines' methods
are wrapped, so that the error says what happened and what works.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ds_plugin_sdk.errors import InvalidTensorError, OpError
from ds_plugin_sdk.integrations.deepspeed.adopt import when_used

# The last release of transformers whose models the injected layers fit, and models that they do not fit there either.
_LAST_FITTING = (4, 43)
_NEVER_FITTING = frozenset({"llama", "mistral", "internlm"})

# What it looks like when two interfaces do not fit: an op is given tensors of the wrong shape or dtype, too.
_MISFITS = (AssertionError, AttributeError, InvalidTensorError, KeyError, NotImplementedError, TypeError)


def explain(engine: ModuleType) -> None:
    """Wrap the methods of ``InferenceEngine``.

    Args:
        engine: ``deepspeed.inference.engine``, executed.
    """
    when_used(_explain, engine)


def explain_hybrid(engine: ModuleType) -> None:
    """Wrap the methods of ``DeepSpeedHybridEngine``.

    Args:
        engine: ``deepspeed.runtime.hybrid_engine``, executed.
    """
    when_used(_explain_hybrid, engine)


def _explain(engine: ModuleType) -> None:
    def injected(self: Any) -> bool:
        return bool(getattr(self._config, "replace_with_kernel_inject", False))

    names = ("_apply_injection_policy", "forward", "_generate")
    _wrap(engine.InferenceEngine, names, injected, "replace_with_kernel_inject")
    initialize = engine.InferenceEngine.__init__

    @functools.wraps(initialize)
    def initialize_explained(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if injected(self) and not _fits(_type_of(self.module)):
            _explain_calls(self.module, "replace_with_kernel_inject")

    engine.InferenceEngine.__init__ = initialize_explained


def _explain_hybrid(engine: ModuleType) -> None:
    def injected(self: Any) -> bool:
        return not self.module.training

    _wrap(engine.DeepSpeedHybridEngine, ("forward", "generate"), injected, "hybrid_engine")


def _wrap(kind: type, names: Sequence[str], injected: Callable[[Any], bool], option: str) -> None:
    for name in names:
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, _explaining(method, injected, option))


def _explaining(method: Callable[..., Any], injected: Callable[[Any], bool], option: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def explaining(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except _MISFITS as error:
            model = _type_of(self.module)
            if not injected(self) or _fits(model):
                raise
            raise _explained(error, model, option) from error

    return explaining


def _explain_calls(model: Any, option: str) -> None:
    """For programs that call the engine's ``module`` themselves, a model that kernel injection does not fit."""

    def explaining(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except _MISFITS as error:
                raise _explained(error, _type_of(model), option) from error

        return call

    for name in ("forward", "generate"):
        method = getattr(model, name, None)
        if method is not None:
            setattr(model, name, explaining(method))


def _explained(error: Exception, model: str, option: str) -> OpError:
    return OpError(
        "DeepSpeed's kernel injection does not fit this model",
        op="transformer_inference",
        why=f"its layers for '{model}' are written for transformers up to 4.43.4"
        f"{', where they fail too' if model in _NEVER_FITTING else ''}; here is {_transformers()}; "
        f"{type(error).__name__}: {error}",
        hint=f"ds_plugin_sdk.integrations.transformers runs transformers 5 on the same kernels; leave out {option}",
    )


def _type_of(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _fits(model: str) -> bool:
    version = _transformers()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return model not in _NEVER_FITTING and numbers <= _LAST_FITTING


def _transformers() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""
