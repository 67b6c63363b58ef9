"""Text to fine-tune on that every Python brings along: what the standard library's functions say of themselves."""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

# Lines as wide as they may be, rather than one for each name.
# fmt: off
MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "enum", "fileinput", "fnmatch", "fractions", "functools",
    "getpass", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "io", "ipaddress", "itertools", "json",
    "keyword", "linecache", "locale", "logging", "math", "mimetypes", "operator", "os", "pathlib", "pickle",
    "platform", "pprint", "queue", "random", "re", "secrets", "shlex", "shutil", "signal", "socket", "sqlite3",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit",
    "tokenize", "traceback", "types", "typing", "unicodedata", "urllib.parse", "uuid", "warnings", "wave",
    "weakref", "zipfile", "zlib",
)
# fmt: on

IGNORED = -100  # a label that cross_entropy passes over


@dataclass(frozen=True)
class Example:
    """A text in two parts: the prompt is read, the answer is learned."""

    prompt: str
    answer: str


def load(kind: str) -> list[Example]:
    """The examples of a stage, in an order that is the same on every rank and in every run.

    Args:
        kind: ``text``, whole documentation strings; ``answers``, what a function does; ``names``, which one does it.
    """
    forms = {
        "text": lambda name, said: Example("", f"{name}: {said}"),
        "answers": lambda name, said: Example(f"Q: What does {name} do?\nA: ", sentence(said)),
        "names": lambda name, said: Example(f"Q: {shorten(sentence(said), 80)}\nA: ", name),
    }
    examples = [forms[kind](name, said) for name, said in documentation().items()]
    random.Random(0).shuffle(examples)
    return examples


def documentation() -> dict[str, str]:
    """The documentation strings of the public functions and classes of `MODULES`, by dotted name."""
    names: dict[str, str] = {}  # by what is said, for many have one name in several modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what is deprecated has documentation, too
        for module in MODULES:
            for name, value in sorted(vars(importlib.import_module(module)).items()):
                said = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
                if said:
                    names.setdefault(said, f"{module}.{name}")
    return {name: said for said, name in names.items()}


def sentence(text: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def encode(examples: list[Example], tokenizer: Any, length: int) -> dict[str, Tensor]:
    """Inputs of a causal language model, int64 [examples, length]: cut or padded on the right to `length` tokens.

    Labels are the tokens of the answers and of their end; those of the prompts and the padding are `IGNORED`.
    """
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), IGNORED)
    mask = torch.zeros(len(examples), length, dtype=torch.int64)
    for row, example in enumerate(examples):
        prompt = tokenizer(example.prompt, add_special_tokens=False).input_ids
        answer = [*tokenizer(example.answer, add_special_tokens=False).input_ids, end]
        tokens = torch.tensor((prompt + answer)[:length])
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
