"""Attention as transformers' registry calls it, under the name ``ds_plugin``."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers.decoder import ops_for
from ds_plugin_sdk.integrations.transformers.source_text import asks_for_sdpa
from ds_plugin_sdk.integrations.transformers.training import attends_in_training, attention_in_training
from ds_plugin_sdk.integrations.transformers.understood import DTYPES, is_plain_inference, torch_has_its_functions

ATTENTION = "ds_plugin"
SDPA = "sdpa"  # torch's attention, as transformers names it

# Arguments without a meaning for attention with a mask: torch's attention in transformers does not read them either.
IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)

# From so many queries of a head on the op on a CPU is torch's attention too: ``kernels/cpu/attention_binding.cpp``.
_TORCHS_FROM = 8

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Name(str, enum.Enum):
    """The name of our attention in a configuration that had torch's; in a deep copy or a pickle of it, that of torch's.

    Dynamo takes members of enumerations as constants. Of other subclasses of ``str``, torch 2.11's knows nothing.
    """

    OURS = ATTENTION

    def __str__(self) -> str:
        return self.value

    def startswith(self, *args: Any) -> bool:  # in Python, so that Dynamo can trace what transformers asks
        return self.value.startswith(*args)

    def __reduce_ex__(self, protocol: object) -> tuple[type[str], tuple[str]]:
        return str, (SDPA,)

    def __deepcopy__(self, memo: object) -> str:
        return SDPA


def register_attention() -> None:
    """Make ``ds_plugin`` known to transformers as a way to attend."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, _own_mask)


def _own_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask that the model's own attention has: anybody may register another one, at any time.

    That of ``sdpa`` may be None, or bool, which a model that has no ``sdpa`` would not understand.
    """
    name = "sdpa" if _has_sdpa(kwargs.get("config")) else "eager"
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)


def _has_sdpa(config: Any) -> bool:
    """Whether the models of a configuration, in the file beside its own, have ``sdpa``."""
    if type(getattr(config, "_attn_implementation_internal", None)) is Name:  # `accelerate` replaces that alone
        return True
    kind = type(config)
    known = _have_sdpa.get(kind)
    if known is None:
        files = (base.__module__.replace("configuration_", "modeling_") for base in kind.__mro__)
        found = next(filter(None, map(_models_in, files)), [])
        known = _have_sdpa[kind] = all(model._supports_sdpa for model in found)
    return known


_have_sdpa: dict[type, bool] = {}  # torch.compile warns of functools' caches


def _models_in(file: str) -> list[type[PreTrainedModel]]:
    """The classes of models that a file, by its module's name, defines."""
    names = vars(sys.modules[file]) if file in sys.modules else {}
    classes: list[Any] = [value for value in names.values() if isinstance(value, type)]
    return [each for each in classes if issubclass(each, PreTrainedModel) and each.__module__ == file]


def has_own_sdpa() -> bool:
    """Whether ``sdpa`` is what transformers has by that name; anybody may register something else."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def has_other_sdpa(file: str) -> bool:
    """Whether a file, by its module's name, has a table of attentions of its own with another ``sdpa``."""
    names = vars(sys.modules[file]) if file in sys.modules else {}
    tables = (each for each in names.values() if issubclass(type(each), AttentionInterface))
    return any(each.get("sdpa") is not sdpa_attention_forward for each in tables)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for attention, with the keys and values of its cache.

    Shapes as in `ds_plugin_sdk.ops.attention.cached_attention`; the result is ``[batch, tokens, heads, head_dim]``.
    It means what transformers' ``sdpa`` means: without a mask and with `is_causal`, query i attends to the keys up to
    i, and keys beyond the queries (the rest of a static cache) are not attended to; one query attends to all.

    The call goes to the model's own attention where the op does not do the same: gradients, dropout, arguments that
    are not known here, more queries than keys, values of another head size than the keys', expanded keys or values, a
    model without ``sdpa``; and on a CPU for many queries, which are torch's in the op, too.

    Raises:
        SdkError: the model was asked to use ``ds_plugin`` by its name, and gives such attentions tensors that torch's
            does not read, as indices of the keys to attend to, in the place of a mask.
    """
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    own = sdpa_attention_forward if _replaces_sdpa(module) else _own_attention(type(module))
    if own is sdpa_attention_forward and not has_own_sdpa():
        own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    understood = (
        own is sdpa_attention_forward
        and not torch.compiler.is_compiling()
        and torch_has_its_functions()
        and not dropout
        and all(value is None or name in IGNORED_ARGUMENTS for name, value in kwargs.items())
        and _fits(module, query, key, value)
        and mask_fits(attention_mask, query.dtype, query.shape[:3], key.shape[2])
        and not (causal and attention_mask is None and query.shape[2] > key.shape[2])
    )
    trains = understood and attends_in_training(query, key, value, attention_mask)
    # To the op queries are the last of the positions: a decoder's text may be longer than that of its encoder. Keys and
    # values are a cache to it, which it may write to, and so takes no expanded ones.
    served = understood and query.shape[2] <= key.shape[2] and 0 not in (*key.stride(), *value.stride())
    if not trains and not (served and is_plain_inference(query) and not _is_torchs(query, key, attention_mask)):
        if own is sdpa_attention_forward and not _replaces_sdpa(module):
            _check_arguments(type(module), kwargs)
        return own(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if causal and attention_mask is None:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if trains:
        unmasked = attention_mask is None
        attended = attention_in_training(query, key, value, attention_mask, bool(causal) and unmasked, scale)
        return attended.transpose(1, 2).contiguous(), None
    attended = attend(
        query, key[:, :, :0], value[:, :, :0], key, value, key.shape[2], scale, attention_mask, bool(causal)
    )
    return attended.transpose(1, 2), None


def _check_arguments(kind: type[nn.Module], arguments: dict[str, Any]) -> None:
    """Raise for a model that does something else where its attention is not ``sdpa`` or ``eager`` by name."""
    given = (name for name, value in arguments.items() if isinstance(value, Tensor) and name not in IGNORED_ARGUMENTS)
    unread = next(given, None)
    if unread is not None and any(asks_for_sdpa(base.__module__) for base in kind.__mro__):
        raise SdkError(
            f"{kind.__name__} cannot attend by 'ds_plugin'",
            why=f"its code asks whether that is 'sdpa', and gives others {unread!r}, which torch's does not read",
            hint="model.set_attn_implementation('sdpa'); accelerate(model) leaves such attentions alone",
        )


def _is_torchs(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether the op would do what the model's own attention does, after it has looked at all keys and values. With a
    mask the model repeats shared ones, which the op need not do.
    """
    repeats = mask is not None and query.shape[1] != key.shape[1]
    return query.device.type == "cpu" and query.shape[2] >= _TORCHS_FROM and not repeats


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    scale: float,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """The op, as `ds_plugin_sdk.ops.attention.cached_attention`; a mask says what is causal too."""
    result: Tensor = ops_for(query.dtype).cached_attention(
        query, key, value, keys, values, past, scale, mask, None, 0, causal and mask is None
    )
    return result


def mask_fits(mask: Tensor | None, dtype: torch.dtype, queries: Sequence[int], positions: int) -> bool:
    """Whether a mask is one for queries, ``[batch, heads, tokens]`` of a dtype, and as many positions, in the sense of
    torch's attention.
    """
    if mask is None:
        return True
    return (
        type(mask) is Tensor
        and mask.dim() == 4
        and mask.dtype in (torch.bool, dtype)
        and mask.shape[3] == positions
        and all(size in (1, wanted) for size, wanted in zip(mask.shape, queries, strict=False))
    )


def _fits(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        type(key) is type(value) is Tensor
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and query.dim() == key.dim() == 4
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and query.shape[3] == key.shape[3]
        and query.device == key.device == value.device
    )


# ---------------------------------------------------------------------- the model's own
_own_attentions: dict[type[nn.Module], Attention] = {}  # torch.compile warns of functools' caches


def _replaces_sdpa(module: nn.Module) -> bool:
    """Whether the model's attention was torch's, and `accelerate` has put ours there."""
    return type(getattr(getattr(module, "config", None), "_attn_implementation_internal", None)) is Name


def _own_attention(kind: type[nn.Module]) -> Attention:
    """What the layers of a class's file would call by default: torch's, or the file's own if that does more."""
    own = _own_attentions.get(kind)
    if own is None:
        own = _own_attentions[kind] = _find_own_attention(kind)
    return own


def _find_own_attention(kind: type[nn.Module]) -> Attention:
    for file in dict.fromkeys(base.__module__ for base in kind.__mro__):
        names = vars(sys.modules[file]) if file in sys.modules else {}
        eager = names.get("eager_attention_forward")
        if eager is not None:
            has_sdpa = all(model._supports_sdpa for model in _models_in(file))
            return sdpa_attention_forward if has_sdpa else functools.partial(_eager, eager)
    return sdpa_attention_forward  # type: ignore[no-any-return]  # transformers is not typed here


def _eager(
    eager: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A file's own function, which wants a mask to add where ours may be None or bool."""
    tokens, positions = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal  # encoders alone do not say
    mask = attention_mask
    if mask is None and causal and tokens > 1:
        mask = torch.ones((tokens, positions), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        # Softmaxes of these functions are in float32, where the lowest number of float64 is minus infinity.
        lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)
    if scaling is not None:
        kwargs["scaling"] = scaling
    return eager(module, query, key, value, mask, **kwargs)


__all__ = [
    "ATTENTION",
    "IGNORED_ARGUMENTS",
    "SDPA",
    "Name",
    "attend",
    "attention_forward",
    "has_other_sdpa",
    "has_own_sdpa",
    "mask_fits",
    "register_attention",
]
