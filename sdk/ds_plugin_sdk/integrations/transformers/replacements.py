"""What the forward of a module is while its model is accelerated: a call of ops, or of the module's own code.

Whether an op may serve is asked at each call, for models are changed after they were accelerated: adapters are added,
hooks registered, weights trained, loaded and moved.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ds_plugin_sdk.integrations.transformers import decoder
from ds_plugin_sdk.integrations.transformers.attention import (
    ATTENTION,
    IGNORED_ARGUMENTS,
    attention_forward,
    has_own_sdpa,
    mask_fits,
)
from ds_plugin_sdk.integrations.transformers.decoder import Decoder, ops_for
from ds_plugin_sdk.integrations.transformers.decoder_row import Given, Row
from ds_plugin_sdk.integrations.transformers.kv_cache import AppendingLayer, growing_layer, may_grow
from ds_plugin_sdk.integrations.transformers.replacement import Replacement
from ds_plugin_sdk.integrations.transformers.training import linear_in_training
from ds_plugin_sdk.integrations.transformers.training_layers import is_rms, norm_in_training
from ds_plugin_sdk.integrations.transformers.understood import Norm, is_plain_inference
from ds_plugin_sdk.integrations.transformers.watch import Watch
from ds_plugin_sdk.integrations.transformers.weights import Look, Looks, Matrix
from ds_plugin_sdk.ops._products import torchs_from

# What a decoder layer does with these is known; others may be given if they are None. The encoder's mask has no meaning
# without what the encoder has put out.
_KNOWN_ARGUMENTS = IGNORED_ARGUMENTS | {
    "attention_mask",
    "cache",
    "encoder_attention_mask",
    "layer_past",
    "past_key_values",
    "position_embeddings",
}


class LinearReplacement(Replacement):
    """A linear layer alone."""

    def __init__(self, module: nn.Module, matrix: Matrix) -> None:
        super().__init__(module)
        self.matrix = matrix
        self._looks = Looks()
        self._forward = type(module).forward
        self._watch = Watch.alone(module)

    def holds(self) -> bool:
        return self._holds(Look.MANY_ROWS)

    def _holds(self, look: Look) -> bool:
        trains = self.matrix.rounded and self.module.training
        return not trains and self._watch.holds() and self.matrix.follow(look)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.own(*args, **kwargs)
        if torch.is_grad_enabled():
            self.matrix.doubt()
            known = len(args) == 1 and not kwargs and type(self.module).forward is self._forward
            trained = linear_in_training(self.module, args[0]) if known else None
            if trained is not None:
                return trained
        elif len(args) == 1 and not kwargs and is_plain_inference(args[0]) and not self._is_torchs(args[0]):
            input: Tensor = args[0]
            look = self._looks.at(input.shape[-2] if input.dim() > 2 else 1)  # rows alone may be a batch's
            # To hold, the matrix may take on another dtype and device.
            if self._holds(look) and input.dtype == self.matrix.dtype and input.device == self.matrix.device:
                return decoder.linear(ops_for(input.dtype), self.matrix, input)
        return self.own(*args, **kwargs)

    def _is_torchs(self, input: Tensor) -> bool:
        """Whether the op would do what the module's own code does, at the price of asking whether it may.

        Not where the contents are no longer the parameter, or never were: `holds` makes them follow.
        """
        if input.dim() < 2 or input.device.type != "cpu":
            return False
        weight = self.module._parameters.get("weight")
        stays = type(weight) is nn.Parameter and weight.data_ptr() == self.matrix.contents.weight.data_ptr()
        return stays and input.numel() >= input.shape[-1] * torchs_from(input.dtype)


class NormReplacement(Replacement):
    """A norm alone."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        super().__init__(module)
        self._norm = norm
        self._trains = is_rms(module)
        self._forward = type(module).forward
        self._watch = Watch.alone(module)

    def holds(self) -> bool:
        return self._watch.holds()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.own(*args, **kwargs)
        if torch.is_grad_enabled():
            known = len(args) == 1 and not kwargs and self._trains and type(self.module).forward is self._forward
            trained = norm_in_training(self.module, args[0]) if known else None
            if trained is not None:
                return trained
        elif len(args) == 1 and not kwargs and is_plain_inference(args[0]) and self.holds():
            input: Tensor = args[0]
            if self._norm.serves(input.dtype) and input.shape[-1:] == (self._norm.columns,):
                return decoder.norm(ops_for(input.dtype), self._norm, input)
        return self.own(*args, **kwargs)


class DecoderReplacement(Replacement):
    """A whole decoder layer, one of several in a row."""

    def __init__(
        self, module: nn.Module, attention: nn.Module, layer: Decoder, row: Row, cache: type[AppendingLayer]
    ) -> None:
        super().__init__(module)
        self.layer = layer
        self._cache = cache
        self.attention: Any = attention
        self.config = attention.config
        # A configuration's own attributes are found by Python code, which takes as long as all other checks.
        self._options = vars(attention.config)
        self._row = row
        self._alone = decoder.Layers(layer)
        self._names = tuple(inspect.signature(type(module).forward).parameters)[2:]
        self._watch = Watch.over(module)
        row.replacements.append(self)

    def take_off(self) -> None:
        super().take_off()
        self._row.end_step()
        # The row has all layers, and so all weights, which only Python's collector would free. Code that has wrapped
        # this forward may still call it, as a layer alone.
        self._row = Row()

    def holds(self) -> bool:
        return self.holds_apart(Look.MANY_ROWS)

    def holds_apart(self, look: Look) -> bool:
        """Asked of this layer alone; `look` as in `Matrix.follow`."""
        return (
            self._watch.holds()
            and self.attends()
            and not (self.module.training and self.layer.is_rounded)
            and all(matrix.follow(look) for matrix in self.layer.matrices)
            and self.layer.has_its_heads
            and all(norm.serves(self.layer.qkv.dtype) for norm in self.layer.norms)
        )

    def kind(self) -> tuple[Any, ...]:
        """What the meaning of its arguments depends on."""
        matrix = self.layer.qkv
        heads = self.layer.rotary, self.layer.rotary_in_part, self.layer.head_dim
        return type(self.module), matrix.dtype, matrix.device, *heads

    def attends(self) -> bool:
        """Whether its attention is ours still."""
        return (
            self.attention.config is self.config
            and self._options.get("_attn_implementation_internal") == ATTENTION
            and has_own_sdpa()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.own(*args, **kwargs)
        if torch.is_grad_enabled():
            self._row.forget()
            for matrix in self.layer.matrices:
                matrix.doubt()
        # Dynamo would trace the state of a step, and guard it.
        elif 1 <= len(args) <= 1 + len(self._names) and not torch.compiler.is_compiling():
            goes_on = self._row.goes_on(args[0])
            given = self._row.given_again(args, kwargs) if goes_on else None
            if given is None:
                given = self._understand(args, kwargs, goes_on)
                if given is not None:
                    self._row.keep(args, kwargs, given)
            if given is not None:
                return self._made_of(args[0], given)
        return self.own(*args, **kwargs)

    def _made_of(self, hidden: Tensor, given: Given) -> Tensor:
        try:
            result = self._row.take_ahead(self, given)
            result = self._row.run_ahead(self, hidden, given) if result is None else result
            result = self._run(hidden, given) if result is None else result
        except BaseException:
            self._row.end_step()
            raise
        self._row.ran(self, hidden, given, result)
        return result

    def _understand(self, args: tuple[Any, ...], kwargs: dict[str, Any], asked: bool) -> Given | None:
        """What the arguments mean; None if the ops do not do with them what the layer's own code does."""
        hidden = args[0]
        named = {**dict(zip(self._names, args[1:], strict=False)), **kwargs} if len(args) > 1 else kwargs
        if not self._serves(hidden, named, asked):
            return None
        embeddings, cache = named.get("position_embeddings"), _cache_in(named)
        angles = None if embeddings is None else self._row.angles.of(embeddings, hidden, self.layer)
        if (angles is None) == self.layer.rotary:
            return None
        dtype, mask = hidden.dtype, named.get("attention_mask")
        return Given(ops_for(dtype), decoder.functions_for(hidden), mask, cache, may_grow(cache), angles)

    def _serves(self, hidden: Tensor, named: dict[str, Any], asked: bool) -> bool:
        """Whether the layer is what it was found to be, and knows these arguments, if the embeddings are angles."""
        cache, layer = _cache_in(named), self.layer
        return (
            is_plain_inference(hidden)
            and hidden.dim() == 3
            and (named.keys() <= _KNOWN_ARGUMENTS or _are_known(named))
            and not named.get("output_attentions")
            and (cache is None or (isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache)))
            # Checkpoints run a layer that trains once without gradients, and must get the same with them.
            and not (cache is None and self.module.training)
            # transformers 5.0 tells static caches where to write.
            and (named.get("cache_position") is None or cache is None or type(cache) is DynamicCache)
            and (named.get("position_embeddings") is None) != layer.rotary
            and (asked or self._asks(hidden, cache))
            and hidden.dtype == layer.qkv.dtype
            and hidden.device == layer.qkv.device
        )

    def _asks(self, hidden: Tensor, cache: Cache | None) -> bool:
        """Whether it holds, after all layers in a step, alone with a prompt, which may be one token too."""
        if cache is None or _is_new(cache, self.attention.layer_idx):
            Looks.count_prompt()
            return self.holds_apart(Look.MANY_ROWS)
        if hidden.shape[1] > 1:  # part of a long prompt, or tokens that a smaller model has guessed
            return self.holds_apart(Look.FEW_ROWS)
        return self._row.begin(self, hidden) or self.holds_apart(Look.NONE)

    def _run(self, hidden: Tensor, given: Given) -> Tensor:
        room = self.room(hidden, given)
        if room is not None and given.functions is not None and self.layer.is_one_call:
            made, alone = room.make_room(hidden.shape[1]), [(given.mask, given.angles)]
            (result,) = decoder.run_whole(self._alone, hidden, made, [room.held], alone, [0], given.functions)
            room.advance(hidden.shape[1])
            return result
        self._row.differs()
        if room is None:
            return decoder.run(given.ops, self.layer, hidden, given.angles, functools.partial(self._attend, given))
        attend = functools.partial(self._attend_in_place, given, room)
        result = decoder.run(given.ops, self.layer, hidden, given.angles, attend)
        room.advance(hidden.shape[1])
        return result

    def room(self, hidden: Tensor, given: Given) -> AppendingLayer | None:
        """Its layer of the cache, if the op can append to it and attend."""
        cache = given.cache
        if cache is None or not given.grows:
            return None
        room = growing_layer(cache, self.attention.layer_idx, self._cache)
        return room if room is not None and self.fits(room, hidden, given.mask) else None

    def fits(self, room: AppendingLayer, hidden: Tensor, mask: Tensor | None) -> bool:
        """Whether the op can append and attend: if no mask says to which, only to all, or to all before a query."""
        batch, tokens, _ = hidden.shape
        layer = self.layer
        if not room.is_initialized:
            none = hidden.new_empty((batch, layer.kv_heads, 0, layer.head_dim))
            room.lazy_initialization(none, none)
        if not room.takes(hidden):
            return False
        past = room.held
        if mask is not None:
            return mask_fits(mask, hidden.dtype, (batch, layer.heads, tokens), past + tokens)
        return tokens == 1 or (past == 0 and bool(self.attention.is_causal))

    def _attend_in_place(self, given: Given, room: AppendingLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        caches, mask = room.make_room(key.shape[2]), given.mask
        op = given.ops.cached_attention if len(caches) == 2 else given.ops.cached_attention_int8
        attended: Tensor = op(query, key, value, *caches, room.held, self.layer.scale, mask, None, 0, mask is None)
        return attended

    def _attend(self, given: Given, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention, cache = self.attention, given.cache
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        attended, _ = attention_forward(attention, query, key, value, given.mask, scaling=self.layer.scale)
        return attended.transpose(1, 2)


def _cache_in(named: dict[str, Any]) -> Any:
    """By its name of transformers 5.24, which counts if both are given, or the one before, or GPT-NeoX's."""
    return named["cache"] if "cache" in named else named.get("past_key_values", named.get("layer_past"))


def _is_new(cache: Cache, index: int) -> bool:
    """Whether a layer of a cache has held nothing yet. How much it holds may be a number on a device, to wait for."""
    return index >= len(cache.layers) or not getattr(cache.layers[index], "is_initialized", False)


def _are_known(named: dict[str, Any]) -> bool:
    """Whether arguments that are not known are None."""
    return all(value is None or name in _KNOWN_ARGUMENTS for name, value in named.items())


__all__ = [
    "DecoderReplacement",
    "LinearReplacement",
    "NormReplacement",
]
