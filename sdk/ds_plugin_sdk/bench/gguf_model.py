"""A language model of transformers as a GGUF file, and its tokens by llama.cpp, for ``sdk bench decode``.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; of the tensors' names, the package
``gguf``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

# What llama.cpp's own program quantizes to, by the name of its type for most matrices.
Type = Literal["Q8_0", "Q4_0"]


def write(model: Any, file: Path) -> None:
    """Write the weights of a GPT-2, LLaMA, Phi 3 or Gemma 3: matrices in bfloat16, vectors in float32; no tokenizer."""
    import gguf

    config = model.config
    kind = {
        "gpt2": gguf.MODEL_ARCH.GPT2,
        "llama": gguf.MODEL_ARCH.LLAMA,
        "phi3": gguf.MODEL_ARCH.PHI3,
        "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    }[config.model_type]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[kind])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = _laid_out(model, name, parameter.detach()).contiguous()
        if values.dim() == 1:
            writer.add_tensor(found, values.float().numpy())
        else:
            raw = values.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(found, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: Any) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    angles = config.rope_parameters
    if config.model_type == "gemma3_text":  # llama.cpp knows the angles of layers with a window, and which these are
        angles = angles["full_attention"]
        writer.add_sliding_window(config.sliding_window)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(angles["rope_theta"])


def _laid_out(model: Any, name: str, values: Tensor) -> Tensor:
    """A parameter as llama.cpp has it: a row for each output, a LLaMA's channels that turn together side by side, and
    Gemma's norms with the 1 that its code adds to their weights.
    """
    path, kind = name.rpartition(".")[0], model.config.model_type
    if type(model.get_submodule(path)).__name__ == "Conv1D" and values.dim() == 2:
        return values.t()
    if kind == "gemma3_text" and path.endswith("norm"):
        return values.float() + 1
    if kind == "llama" and path.endswith((".q_proj", ".k_proj")):
        # The rotary embedding turns channel i of a head with channel i + half a head; llama.cpp, 2 i with 2 i + 1.
        heads = values.reshape(-1, 2, model.config.head_dim // 2, values.shape[1])
        return heads.transpose(1, 2).flatten(0, 2)
    return values


def quantize(file: Path, type: Type) -> Path:
    """Let llama.cpp quantize a file, by its own choice of types for the layers; the result lies beside it.

    Raises:
        RuntimeError: it cannot.
    """
    import llama_cpp

    _quiet()
    target = file.with_suffix(f".{type}")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    options.nthread = torch.get_num_threads()
    if llama_cpp.llama_model_quantize(os.fsencode(file), os.fsencode(target), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp cannot quantize {file} to {type}")
    return target


class Generation:
    """One sequence of tokens in a context of llama.cpp."""

    def __init__(self, context: Any, vocabulary: int) -> None:
        self._context = context
        self._vocabulary = vocabulary

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens: logits after the last of them, ``[vocab_size]``, float32, valid until the next call.

        Raises:
            RuntimeError: llama.cpp cannot run them.
        """
        import llama_cpp

        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, len(tokens)))
        if status:
            raise RuntimeError(f"llama.cpp cannot run {len(tokens)} tokens: llama_decode returns {status}")
        found = llama_cpp.llama_get_logits_ith(self._context, -1)
        values = (ctypes.c_float * self._vocabulary).from_address(ctypes.addressof(found.contents))
        return torch.frombuffer(values, dtype=torch.float32)

    def restart(self) -> None:
        """Begin a new sequence."""
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)


@contextlib.contextmanager
def loaded(file: Path, length: int) -> Iterator[Generation]:
    """Load a model, for a sequence of at most `length` tokens and with torch's number of threads; all else by default.

    Raises:
        RuntimeError: llama.cpp cannot load it.
    """
    import llama_cpp

    _quiet()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    try:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = length
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        context = llama_cpp.llama_init_from_model(model, options)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {length} tokens for {file}")
        try:
            yield Generation(context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        finally:
            llama_cpp.llama_free(context)
    finally:
        llama_cpp.llama_model_free(model)


def _quiet() -> None:
    """llama_cpp prints what llama.cpp logs, by the level of this logger."""
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
