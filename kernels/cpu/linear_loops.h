// What the loops of linear.cpp offer to linear_binding.cpp.
#pragma once

#include <ds_kernels/linear.h>

namespace ds_kernels::cpu {

// A linear layer on a few inputs.
struct LinearTask : LinearLayer {
  const float* widened;     // the inputs in floats
  ShortInputs shorts;       // the same in 16 bits, for quantized weights; null where they are not to be used
  const float* group_sums;  // what sum_groups gives, for weights with offsets
  const uint16_t* pairs;    // bfloat16 inputs as pair_inputs gives them, for AMX
};

// Computes outputs [begin, end) of every input, of which there are at most kMostTileInputs.
using LinearLoop = void (*)(const LinearTask& task, int64_t begin, int64_t end);

// `count` elements to floats.
using WidenLoop = void (*)(const void* from, float* to, int64_t count);

// Inputs of tiles at a time: their sums, too, shall be in the first cache.
constexpr int64_t kMostTileInputs = 128;

// Whether there are tiles here for a layer's products with many inputs of 16 bits.
using HasTiles = bool (*)(const LinearLayer& layer);

// Whether a layer has so many inputs that they are used for all of them.
using UsesTiles = bool (*)(const LinearLayer& layer);

// How many bytes ShortInputs::bytes has for each input of a layer; 0 if its loops read none of them.
using BytesOfInput = int64_t (*)(const LinearLayer& layer);

// The inputs of a task in 16 bits; false if they cannot be had here, or have an element that is not finite: a group with
// one is zeros with NaN as their scale. `bytes` is null if there are none.
using ShortenLoop = bool (*)(const LinearTask& task, int16_t* values, float* scales, int32_t* eights, uint8_t* bytes);

// The sums of each group of a task's inputs, [inputs, groups].
using SumGroupsLoop = void (*)(const LinearTask& task, float* sums);

// Products by AMX take inputs and outputs in blocks of so many, and at most so many inputs: their sums shall be in the second cache.
constexpr int64_t kAmxInputs = 16, kMostAmxInputs = 512, kAmxOutputs = 32;
constexpr int64_t amx_blocks(int64_t inputs) { return (inputs + kAmxInputs - 1) / kAmxInputs; }

// Outputs and columns whose weights are laid out at a time, so that these columns of a block of outputs and of two blocks of inputs
// are in the first cache together. Few inputs come from the second one, and weights stay in the first; many would come from
// beyond, so they stay, and the weights of many outputs come from the second.
constexpr int64_t kFewAmxInputs = 128, kManyAmxOutputs = 256;
constexpr int64_t amx_outputs_at_once(int64_t inputs) { return inputs <= kFewAmxInputs ? kAmxOutputs : kManyAmxOutputs; }
constexpr int64_t amx_columns_at_once(int64_t inputs) { return inputs <= kAmxInputs ? 512 : 256; }

// Floats that AmxLoop needs: for weights, two in a float, and for sums and gates.
constexpr int64_t amx_room(int64_t inputs, bool gated) {
  const int64_t sums = amx_blocks(inputs) * kAmxInputs * (gated ? 2 : 1);
  return amx_outputs_at_once(inputs) * (amx_columns_at_once(inputs) / 2 + sums);
}

// Whether there are products by AMX here for a layer with inputs in bfloat16.
using HasAmx = bool (*)(const LinearLayer& layer);

// Computes outputs [begin, end) of every input in pairs; `room` has amx_room() floats.
using AmxLoop = void (*)(const LinearTask& task, int64_t begin, int64_t end, float* room);

// Blocks [begin, end) of a layer's inputs in pairs of columns, each [columns / 2, kAmxInputs, 2]; the last is filled up with
// zeros.
using PairLoop = void (*)(const LinearLayer& layer, int64_t begin, int64_t end, uint16_t* pairs);

struct LinearLoops {
  LinearLoop (*linear)(Dtype dtype, bool quantized, bool int4);
  WidenLoop (*widen)(Dtype dtype);
  HasTiles has_tiles;
  UsesTiles uses_tiles;
  BytesOfInput bytes_of_input;
  ShortenLoop shorten;
  SumGroupsLoop sum_groups;
  HasAmx has_amx;
  AmxLoop (*by_amx)(bool quantized, bool int4);
  PairLoop pair_inputs;
};

}  // namespace ds_kernels::cpu
