// The structure that functions of products.cpp and plain_products.cpp take; model/weights/native_products.py has the same.
#pragma once

#include "call.h"

struct Product {
    const bf16* inputs;  // [rows, width]
    int64_t rows, width;
    const void* weights;     // [outputs, width], as the function wants them
    int64_t outputs, group;  // of neighbouring inputs that share scales; the last may be smaller
    const bf16* bias;        // [outputs], or null
    bf16* output;            // [rows, outputs]
    int64_t threads;
};
