// Random layerwise token dropping: tokens are moved as bytes, whatever they mean.
#pragma once

#include <cstdint>

namespace ds_kernels {

// Whether token indices are all at least 0 and less than `sequence`. `within` is in host memory and true before: a
// device that had to be waited for leaves it, and its kernels fail on such an index as torch's do.
struct TokenCheck {
  const int32_t* indices;
  int64_t count, sequence;
  bool* within;
};

// Rows of token indices, to be sorted.
struct TokenRows {
  const int32_t* from;  // [rows, reserved]; each in [0, sequence), some of them perhaps equal
  int32_t* to;          // elsewhere
  int64_t rows, reserved, sequence;
};

// Tokens of a batch of sequences: where each begins, in bytes.
struct Tokens {
  char* data;
  int64_t sequence;  // from one sequence of the batch to the next
  int64_t token;     // from one token to the next
};

// Tokens and the chosen ones among them, all[b, indices[b, i]] and chosen[b, i].
struct TokenMove {
  Tokens all, chosen;
  const int32_t* indices;  // [batch, reserved]
  int64_t batch, sequence, reserved;
  int64_t bytes;  // of a token
};

// chosen = all
struct TokenGather : TokenMove {};

// all = chosen, of equal indices the last
struct TokenScatter : TokenMove {};

// output[l, b, 0, i, j] = mask[b, 0, indices[l, b, i], indices[l, b, j]]
struct MaskGather {
  const char* mask;        // [batch, 1, sequence, sequence]
  const int32_t* indices;  // [layers, batch, reserved]
  char* output;            // [layers, batch, 1, reserved, reserved]
  int64_t layers, batch, sequence, reserved;
  int64_t element_size;  // 1, 2, 4 or 8 bytes
};

}  // namespace ds_kernels
