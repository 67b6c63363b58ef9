// A CUDA stream by a type of the language, so that bindings need none of CUDA's headers.
#pragma once

namespace ds_kernels::cuda {

using Stream = void*;  // cudaStream_t

}  // namespace ds_kernels::cuda
