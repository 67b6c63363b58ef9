"""Says what to do where DeepSpeed's kernel injection does not fit a model.

``init_inference(replace_with_kernel_inject=True)`` puts layers into the model that were written for the transformers of
their time, and so does the hybrid engine for inference between training steps. Where those have moved on, the layers
fail, on every device, before or between calls of kernels, with an `AttributeError` deep inside; and some models they
never fitted. The engines' methods are wrapped, so that the error says what happened and what works.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError, OpError
from ds_plugin_sdk.integrations.deepspeed.adopt import when_used
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.workspace import workspace

# The last release of transformers whose models the injected layers fit, and models that they do not fit there either.
_LAST_FITTING = (4, 43)
_NEVER_FITTING = frozenset({"llama", "mistral", "internlm"})

_MISFIT = "DeepSpeed's kernel injection does not fit this model"

# What it looks like when two interfaces do not fit: an op is given tensors of the wrong shape or dtype, too.
_MISFITS = (AssertionError, AttributeError, InvalidTensorError, KeyError, NotImplementedError, TypeError)
# And where a layer's cache is unpacked that is of another kind.
_MISFITS_OF_CACHES = (IndexError, ValueError)


class _Wrong(NamedTuple):
    """A model for which DeepSpeed puts in layers that compute something else, without an error."""

    what: str
    is_so: Callable[[Any], bool]


_WRONG = {
    "distilbert": _Wrong("layers that normalize first, where the model's normalize last", lambda config: True),
    "gpt_neox": _Wrong(
        "layers that add attention and MLP in parallel, where the model's add them in turn",
        lambda config: not getattr(config, "use_parallel_residual", True),
    ),
}


def explain(engine: ModuleType) -> None:
    """Wrap the methods of ``InferenceEngine``.

    Args:
        engine: ``deepspeed.inference.engine``, executed.
    """
    when_used(_explain, engine)


def explain_layers(ds_transformer: ModuleType) -> None:
    """Wrap the layers that are put in: programs call the model itself, ``engine.module``, too.

    Args:
        ds_transformer: ``deepspeed.model_implementations.transformers.ds_transformer``, executed.
    """
    when_used(_explain_layers, ds_transformer)


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


def _explain_hybrid(engine: ModuleType) -> None:
    def injected(self: Any) -> bool:
        return not self.module.training and bool(getattr(self, "_inference_containers", ()))

    _wrap(engine.DeepSpeedHybridEngine, ("forward", "generate"), injected, "hybrid_engine")


def _wrap(kind: type, names: Sequence[str], injected: Callable[[Any], bool], option: str) -> None:
    for name in names:
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, _explaining(method, injected, option))


def _explaining(method: Callable[..., Any], injected: Callable[[Any], bool], option: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def explaining(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self.module, "config", None)
        model = getattr(config, "model_type", type(self.module).__name__)
        wrong = _WRONG.get(model)
        if wrong is not None and injected(self) and wrong.is_so(config):
            raise OpError(
                _MISFIT,
                op="transformer_inference",
                why=f"for '{model}' DeepSpeed puts in {wrong.what}: the results would be wrong",
                hint=f"leave out {option}",
            )
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            of_layer = isinstance(error, OpError) and error.what == _MISFIT
            of_caches = model in _NEVER_FITTING and isinstance(error, _MISFITS_OF_CACHES)
            misfit = of_layer or isinstance(error, _MISFITS) or (of_caches and not isinstance(error, OpError))
            if not (misfit and injected(self)) or _fits(model):
                raise
            cause = error.__cause__ if of_layer else error  # the engine knows the model's name
            raise _explained(cause, model, option) from cause

    return explaining


def _explain_layers(ds_transformer: ModuleType) -> None:
    layer = ds_transformer.DeepSpeedTransformerInference
    forward = layer.forward

    @functools.wraps(forward)
    def explaining(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.pre_layer_norm and args and isinstance(args[0], Tensor):
            # The layer adds to its input in place, and the model may have given that to its caller: hidden_states.
            args = (args[0].clone(), *args[1:])
        past = kwargs.get("layer_past") or kwargs.get("past_key_value")
        if isinstance(past, tuple) and isinstance(past[1], Tensor):
            # What a model hands over may end before the cache does: tokens that were tried and not taken. The layer
            # itself would take several tokens for a new sequence.
            workspace.go_on(self.config.layer_id, past[1])
        try:
            return forward(self, *args, **kwargs)
        except _MISFITS as error:
            model = type(self).__name__.removeprefix("DeepSpeed").removesuffix("Inference").lower()
            if _fits(model):
                raise
            raise _explained(error, model, "replace_with_kernel_inject") from error

    layer.forward = explaining


def _explained(error: BaseException | None, model: str, option: str) -> OpError:
    return OpError(
        _MISFIT,
        op="transformer_inference",
        why=f"its layers for '{model}' are written for transformers up to 4.43.4"
        f"{', where they fail too' if model in _NEVER_FITTING else ''}; here is {_transformers()}; "
        f"{type(error).__name__}: {error}",
        hint=f"ds_plugin_sdk.integrations.transformers runs transformers 5 on the same kernels; leave out {option}",
    )


def _fits(model: str) -> bool:
    version = _transformers()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return model not in _NEVER_FITTING and numbers <= _LAST_FITTING


def _transformers() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""
