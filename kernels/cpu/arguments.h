// Single tensors as arguments, and how a loop over rows is shared among threads.
#pragma once

#include <ds_kernels/arguments.h>

#include "run.h"
