"""Names of an accelerator's class: a value in the place of a method, and names that are spelt wrong.

A misspelt method is never called, and a misspelt attribute never read: what the class inherits answers instead.
"""

from __future__ import annotations

import difflib
import inspect
import warnings

from ds_plugin_sdk.errors import InvalidAcceleratorError

_STATED_TYPES = (str, int, tuple, list, dict)


def check_names(cls: type) -> None:
    """Warn of what a class states by a wrong name.

    Raises:
        InvalidAcceleratorError: a value hides a method.
    """
    for name in vars(cls).keys() & _methods(_of_the_sdk(cls)):
        if isinstance(value := vars(cls)[name], _STATED_TYPES):
            raise InvalidAcceleratorError(
                f"{cls.__name__}.{name} hides a method",
                why=f"{name} = {value!r} is no function",
                hint=f"write def {name}(self, ...)",
            )
    for name, meant in misnamed(cls, cls).items():
        warnings.warn(
            f"ds-plugin-sdk: {cls.__module__}.{cls.__qualname__}.{name} is not used: "
            f"{_of_the_sdk(cls).__name__} has {meant}; a leading underscore says that it is the class's own",
            RuntimeWarning,
            stacklevel=_level_of_the_plugin(),
        )


def misnamed(cls: type, accelerator: type) -> dict[str, str]:
    """Attributes and methods that nothing reads, with the name each seems to be meant for.

    A leading underscore says that a name is the class's own.

    Args:
        cls: whose own they are: `accelerator`, a class of the plugin's that it is derived from, or a mixin.
    """
    sdks = _of_the_sdk(accelerator)
    methods, stated = _methods(sdks), _stated(sdks)
    found = {}
    for name, value in vars(cls).items():
        is_method = hasattr(value, "__get__") and not isinstance(value, type)
        known = methods if is_method else stated
        if name[0] == "_" or name in known or any(hasattr(parent, name) for parent in cls.__bases__):
            continue
        if not is_method and not isinstance(value, _STATED_TYPES):
            continue
        meant = {other for other in known - vars(cls).keys() if _is_misspelt(name, other, plural=not is_method)}
        if near := difflib.get_close_matches(name, meant, n=1, cutoff=0):
            found[name] = near[0]
    return found


def _is_misspelt(name: str, meant: str, plural: bool) -> bool:
    """Whether a name has another's words with some letters changed; without `plural`, more than an s at their ends."""
    words, others = name.split("_"), meant.split("_")
    if len(words) != len(others):
        return False
    changed = [(word, other) for word, other in zip(words, others, strict=True) if word != other]
    if not plural and all(word.removesuffix("s") == other.removesuffix("s") for word, other in changed):
        return False
    # A word with a number means another thing: fp8 is not fp16.
    return all(
        not any(map(str.isdigit, word + other)) and difflib.SequenceMatcher(None, word, other).ratio() >= 0.8
        for word, other in changed
    )


def _level_of_the_plugin() -> int:
    """For `warnings`: how far from the caller the code is that makes a class; plugins may have an __init_subclass__."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and (
        frame.f_code.co_name == "__init_subclass__"
        or frame.f_globals.get("__name__", "").partition(".")[0] in ("ds_plugin_sdk", "abc")
    ):
        level, frame = level + 1, frame.f_back
    return level


def _of_the_sdk(cls: type) -> type:
    return next(parent for parent in cls.__mro__[1:] if parent.__module__.startswith("ds_plugin_sdk."))


def _stated(cls: type) -> set[str]:
    return {name for parent in cls.__mro__ for name in vars(parent).get("__annotations__", ()) if name[0] != "_"}


def _methods(cls: type) -> set[str]:
    return {name for name in dir(cls) if name[0] != "_" and inspect.isfunction(getattr(cls, name))}


__all__ = ["check_names", "misnamed"]
