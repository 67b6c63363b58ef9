// Int4 weights as they lie in memory.
#pragma once

#include <vector>

#include <ds_kernels/linear.h>

namespace ds_kernels {

// Bytes become levels from -8 to 7, and these pairs: column c of a block of 64 is in bits 4 (c / 16) and up of the block's
// word c % 16.
inline std::vector<Int4Pair> pairs_of(std::vector<int8_t>& levels) {
  std::vector<Int4Pair> pairs(levels.size() / 2);
  for (size_t i = 0; i < levels.size(); ++i) {
    levels[i] = static_cast<int8_t>((levels[i] & 15) - 8);
    const size_t column = i % kInt4Block, bit = 4 * (column / 16);
    Int4Pair& pair = pairs[i / kInt4Block * 32 + 2 * (column % 16) + bit / 8];
    pair.bits = static_cast<uint8_t>(pair.bits | (levels[i] + 8) << bit % 8);
  }
  return pairs;
}

}  // namespace ds_kernels
