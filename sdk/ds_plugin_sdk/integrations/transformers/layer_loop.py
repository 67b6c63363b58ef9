"""The loop of a model that calls its layers: where it is, and what it does between them."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from typing import NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_plugin_sdk.integrations.transformers.replacement import FORWARD_CODE

# The code that is between a layer's forward and the one who calls the layer; `inner` where the layer has had hooks.
_CALLS = {
    nn.Module._call_impl.__code__,
    nn.Module._wrapped_call_impl.__code__,
    GradientCheckpointingLayer.__call__.__code__,
    FORWARD_CODE,
}
_CALLS |= {each for each in nn.Module._call_impl.__code__.co_consts if isinstance(each, types.CodeType)}


class LayerLoop(NamedTuple):
    """Who calls a layer. What asks for it is called by the layer's replacement.

    Attributes:
        depth: how far up from that is.
        call: the identity of the frame of the code in the file of the layer's class; None if there is none. The
            frame itself would keep alive what its callers have. Another one may get the same, and begins with the first
            layer again.
        at: the instruction in it that calls the layer.
        is_direct: whether nobody else's code, which may do more, is in between, or brings the layers.
        is_plain: whether nothing else runs between two calls of that instruction: what one layer puts out is given to
            the next one as it is, and nothing is called or written.
    """

    depth: int = 0
    call: int | None = None
    at: int = 0
    is_direct: bool = False
    is_plain: bool = False

    @classmethod
    def around(cls, module: nn.Module) -> LayerLoop:
        file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
        frame, depth, is_direct = sys._getframe(2), 0, True  # the replacement
        while frame.f_back is not None and file is not None:
            frame, depth = frame.f_back, depth + 1
            code = frame.f_code
            if code.co_filename == file:
                source = _source_of(code, frame.f_lineno - code.co_firstlineno)
                is_direct = is_direct and (source.layers is None or _are_listed(frame, source.layers))
                is_plain = is_direct and source.layers is not None and source.calls_alone
                return cls(depth, id(frame), frame.f_lasti, is_direct, is_plain)
            is_direct = is_direct and code in _CALLS
        return cls()

    def goes_on(self) -> bool:
        """Whether this is the call of another layer by the same loop."""
        if self.call is None:
            return False
        try:
            frame = sys._getframe(2 + self.depth)
        except ValueError:  # there are not so many
            return False
        return id(frame) == self.call and frame.f_lasti == self.at


def _are_listed(frame: types.FrameType, names: tuple[str, ...]) -> bool:
    """Whether layers of ``self`` are in a list of torch's, which runs nobody's code when it is gone over."""
    found = frame.f_locals.get("self")
    for name in names:
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    return type(found) is nn.ModuleList


class _Source(NamedTuple):
    """What is written of a loop.

    Attributes:
        layers: where in ``self`` that is which it goes over; None if it is elsewhere.
        calls_alone: whether it is ``for ..., layer, ... in ...: hidden = layer(hidden, ...)``, maybe after names of
            what it reads, and all other arguments are names and parts of what these are.
    """

    layers: tuple[str, ...] | None = None
    calls_alone: bool = False


_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)

# What is read without a call: names, and parts of what these are; of two, that which a condition says.
_READ = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.expr_context),
    *(ast.IfExp, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop),
)


@functools.cache
def _source_of(code: types.CodeType, line: int) -> _Source:
    """Of the one loop around a line of a method, counted from its first one."""
    try:
        tree = ast.parse("if True:\n" + inspect.getsource(code))
        loops = [node for node in ast.walk(tree) if isinstance(node, _LOOPS) and _is_around(node, 2 + line)]
        if len(loops) != 1 or not isinstance(loops[0], ast.For) or not _is_source_of(tree, code):
            return _Source()
    except Exception:  # a file that is not what it was, or a function that cannot be read apart: whatever tells so
        return _Source()
    return _Source(_layers_in(loops[0].iter), _calls_alone(loops[0]))


def _is_around(loop: ast.AST, line: int) -> bool:
    places = [part for part in ast.walk(loop) if isinstance(part, ast.expr | ast.stmt)]
    return min(part.lineno for part in places) <= line <= max(part.end_lineno or 0 for part in places)


def _layers_in(node: ast.expr) -> tuple[str, ...] | None:
    """``self.model.layers``, or the first ones of these, or these counted, as names."""
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[layers], keywords=[]):
            return _layers_in(layers)
        case ast.Subscript(value=layers, slice=ast.Slice(lower=None, step=None)):
            return _layers_in(layers)
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return (name,)
        case ast.Attribute(value=value, attr=name):
            before = _layers_in(value)
            return None if before is None else (*before, name)
    return None


def _calls_alone(loop: ast.For) -> bool:
    *before, last = loop.body
    names = [each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)]
    read: list[ast.AST] = []
    for step in before:
        match step:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names.append(name)
                read.append(value)
            case _:
                return False
    match last:
        case ast.Assign(
            targets=[ast.Name(id=hidden)],
            value=ast.Call(func=ast.Name(id=layer), args=[ast.Name(id=given), *others], keywords=named),
        ):
            read += [*others, *(keyword.value for keyword in named)]
            is_read = all(isinstance(part, _READ) for each in read for part in ast.walk(each))
            return is_read and hidden == given and hidden not in names and names.count(layer) == 1
    return False


def _is_source_of(tree: ast.Module, code: types.CodeType) -> bool:
    """Whether it has the code's names and constants: a file may have been written since it was imported."""
    compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    found = [each for each in compiled.co_consts if isinstance(each, types.CodeType) and each.co_name == code.co_name]
    return len(found) == 1 and _named_in(found[0]) == _named_in(code)


def _named_in(code: types.CodeType) -> tuple[object, ...]:
    """Python compiles a function otherwise where its file imports a module; the same names are in it."""
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    return code.co_names, code.co_varnames, code.co_freevars, constants


__all__ = ["LayerLoop"]
