// Rows times weights in blocks, in any form: see product_steps.h. With few rows, reading the weights is most of the work.
//
// Outputs lie in blocks of 64. A block is a header and then steps of one or several words for each output; where groups have
// headers, each group of inputs is a header and steps. Form says what a word has.
//
// Codes meet inputs that are rounded to bytes, each group of a row by a scale of its own, by products of integers. Weights
// in bf16, and codes of 8 bits where inputs have to keep 16, meet them in pairs of bf16 where the processor multiplies
// these, elsewhere in fp32: for few rows weights are widened in registers, each time; for more rows a block is widened once
// for all of them.
#pragma once

#include "product.h"
#include "product_bytes.h"

namespace {

constexpr int CACHE_LINE = 64;                   // bytes
constexpr int ROWS_TOGETHER = 6;
constexpr int ROWS_WIDENED = 512;                // the most whose inputs are widened at once
constexpr int AHEAD = 16384;                     // bytes, where a block is read once

inline int64_t groups_of(const Product& product) { return round_up(product.width, product.group) / product.group; }

// A block's weights; strides are in bytes, from group to group.
struct OutputBlock {
    int64_t first;  // output
    const uint8_t *weights, *headers;
    int64_t weight_stride, header_stride;
};

// What is brought to the second cache meanwhile, which a block does not fill: so many bytes from `at` on in each step.
// Each step fetches as much: where some have to wait for memory, others that fetch nothing do not make up for it.
struct Fetch {
    const uint8_t* at;
    int64_t bytes;
    int64_t due = 0;

    void step() {
        for (due += bytes; due >= CACHE_LINE; due -= CACHE_LINE, at += CACHE_LINE) __builtin_prefetch(at, 0, 2);
    }
};

// The vectors of a block's outputs that are added to at once for so many rows.
constexpr int panel_of(int rows, int sums) {
    int vectors = VECTORS;
    while (vectors > 1 && vectors * rows > sums) vectors /= 2;
    return vectors;
}

// Computes a block's outputs of ROWS rows.
template <typename Step, typename Form, int ROWS>
void multiply(const Product& product, const OutputBlock& block, const Inputs<typename Step::Number>& inputs,
              int64_t first_row, Fetch fetch) {
    constexpr int PANEL = panel_of(ROWS, Step::SUMS);
    const int64_t groups = groups_of(product);
    for (int first = 0; first < VECTORS; first += PANEL) {
        const auto* numbers = inputs.numbers + first_row * inputs.stride;
        Floats totals[ROWS][PANEL] = {};
        for (int64_t group = 0; group < groups; ++group) {
            const uint8_t* at = block.weights + group * block.weight_stride;
            const uint8_t* header = block.headers + group * block.header_stride;
            typename Step::Sum sums[ROWS][PANEL];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
                for (int v = 0; v < PANEL; ++v) sums[row][v] = inputs.start((first_row + row) * groups + group);
            const int64_t left = product.width - group * product.group;
            const int64_t steps = std::min(product.group, left) / Step::INPUTS;
            for (int64_t step = 0; step < steps; ++step) {
                fetch.step();
                Step::template add<ROWS, PANEL>(sums, at + first * VECTOR, numbers, inputs.stride);
                at += Step::BYTES;
                numbers += Step::INPUTS;
            }
#pragma GCC unroll 16
            for (int v = 0; v < PANEL; ++v) {
                const typename Form::Numbers numbers = Form::numbers_at(header, first + v);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row) {
                    const int64_t index = (first_row + row) * groups + group;
                    totals[row][v] =
                        Form::added(totals[row][v], inputs.product(sums[row][v], index), numbers, inputs.sum(index));
                }
            }
        }
        for (int v = 0; v < PANEL; ++v) {
            const int64_t output = block.first + (first + v) * LANES, left = product.outputs - output;
            const Floats bias = product.bias ? load_bf16(product.bias + output, left) : Floats{};
            for (int row = 0; row < ROWS; ++row)
                store_bf16(product.output + (first_row + row) * product.outputs + output,
                           Form::scaled(totals[row][v], block.headers, first + v) + bias, left);
        }
        fetch.bytes = 0;  // has all that it was to fetch
    }
}

// Multiplies all rows, by as few passes over the block's weights as there can be, of equal heights. The first pass finds
// these in memory, the others in the cache: so all passes together fetch the weights of the block that comes next, whose
// bytes are [next, end). A single one fetches what is a little ahead of it, or leaves that to the processor.
template <typename Step, typename Form>
void multiply(const Product& product, const OutputBlock& block, const Inputs<typename Step::Number>& inputs,
              const uint8_t* next, const uint8_t* end) {
    const int64_t passes = round_up(product.rows, ROWS_TOGETHER) / ROWS_TOGETHER, steps = product.width / Step::INPUTS;
    const int64_t bytes = round_up(end - next, passes * steps) / (passes * steps);  // of each step
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
        const int64_t rows = (product.rows - row) / (passes - pass);
        const Fetch fetch{next + pass * bytes * steps, bytes};
        switch (rows) {
            case 1: multiply<Step, Form, 1>(product, block, inputs, row, fetch); break;
            case 2: multiply<Step, Form, 2>(product, block, inputs, row, fetch); break;
            case 3: multiply<Step, Form, 3>(product, block, inputs, row, fetch); break;
            case 4: multiply<Step, Form, 4>(product, block, inputs, row, fetch); break;
            case 5: multiply<Step, Form, 5>(product, block, inputs, row, fetch); break;
            default: multiply<Step, Form, ROWS_TOGETHER>(product, block, inputs, row, fetch);
        }
        row += rows;
    }
}

// Writes the block's weights to `wide` as WideStep takes them, fp32 scaled, and returns the block that these are.
template <typename Form>
OutputBlock widen(const Product& product, const OutputBlock& block, uint8_t* wide) {
    OutputBlock widened = block;
    widened.weights = wide;
    const uint8_t* at = block.weights;
    Fetch fetch{at + AHEAD, STEP};
    for (int64_t step = 0; step < product.width / Form::INPUTS; ++step, at += STEP, fetch.step())
#pragma GCC unroll 4
        for (int pair = 0; pair < Form::PAIRS; ++pair, wide += 2 / WideStep::INPUTS * STEP)
            for (int v = 0; v < VECTORS; ++v) {
                const Words words = load<Words>(at + v * VECTOR);
                const Floats first = Form::numbers_of(words, pair, 0), second = Form::numbers_of(words, pair, 1);
                if constexpr (MULTIPLIES_BF16) {
                    store(wide + v * VECTOR, pairs_of(first, second));
                } else {
                    store(wide + v * VECTOR, Form::scaled(first, block.headers, v));
                    store(wide + STEP + v * VECTOR, Form::scaled(second, block.headers, v));
                }
            }
    return widened;
}

// The bytes of a block.
template <typename Form>
int64_t block_bytes(const Product& product) {
    const int64_t headers = Form::HEADED_GROUPS ? groups_of(product) : 1;
    return headers * Form::HEADER + product.width / Form::INPUTS * Form::WORDS * STEP;
}

template <typename Form>
OutputBlock block_at(const Product& product, int64_t index) {
    const uint8_t* headers = static_cast<const uint8_t*>(product.weights) + index * block_bytes<Form>(product);
    const int64_t header = Form::HEADED_GROUPS ? Form::HEADER : 0;  // of a group
    const int64_t stride = header + product.group / Form::INPUTS * Form::WORDS * STEP;
    return {index * BLOCK, headers + Form::HEADER, headers, stride, header ? stride : 0};
}

// Calls `multiply` with each block of outputs, with the bytes that are to be fetched meanwhile, and with its thread's own
// memory, of so many bytes; each thread has neighbouring blocks.
template <typename Form, typename Multiply>
void for_each_block(const Product& product, int64_t own, const Multiply& multiply) {
    if (product.rows == 0) return;
    const int64_t blocks = round_up(product.outputs, BLOCK) / BLOCK, size = block_bytes<Form>(product);
    const auto* weights = static_cast<const uint8_t*>(product.weights);
#pragma omp parallel for num_threads(static_cast<int>(product.threads)) schedule(static, 1)
    for (int64_t thread = 0; thread < product.threads; ++thread) {
        const int64_t end = blocks * (thread + 1) / product.threads;
        const auto memory = allocate<uint8_t>(own);
        for (int64_t index = blocks * thread / product.threads; index < end; ++index) {
            const bool once = product.rows <= ROWS_TOGETHER;
            const uint8_t* next = weights + (index + 1) * size + (once ? AHEAD - size : 0);
            const bool fetches = once ? Form::FETCHED_AHEAD : index + 1 < end;
            multiply(block_at<Form>(product, index), next, fetches ? next + size : next, memory.get());
        }
    }
}

// The inputs as a step takes them; memory for those that are widened.
template <typename Number>
Inputs<Number> inputs_as(const Product& product, std::unique_ptr<float, Free>& memory) {
    if constexpr (std::is_same_v<Number, bf16>) {
        return {product.inputs, product.width};
    } else {
        memory = allocate<float>(product.rows * product.width);
#pragma omp parallel for num_threads(static_cast<int>(product.threads)) if (product.rows > ROWS_TOGETHER)
        for (int64_t row = 0; row < product.rows; ++row)
            for (int64_t input = 0; input < product.width; input += LANES) {
                const int64_t at = row * product.width + input, left = product.width - input;
                store_some(memory.get() + at, load_bf16(product.inputs + at, left), left);
            }
        return {memory.get(), product.width};
    }
}

// Multiplies by weights of 16 bits, or by codes that are widened to as many. They have one group. Many rows are multiplied
// in parts, so that there is memory for the widened inputs of a part alone.
template <typename Form>
void multiply(const Product& product) {
    using Step = StepOf<Form>;
    if (const int64_t parts = round_up(product.rows, ROWS_WIDENED) / ROWS_WIDENED; parts > 1) {
        for (int64_t index = 0; index < parts; ++index) {
            const int64_t begin = product.rows * index / parts;
            Product part = product;
            part.rows = product.rows * (index + 1) / parts - begin;
            part.inputs += begin * product.width;
            part.output += begin * product.outputs;
            multiply<Form>(part);
        }
        return;
    }
    std::unique_ptr<float, Free> memory;
    const bool widens = product.rows >= Form::WIDENED_FROM;
    Inputs<typename Step::Number> few{};
    Inputs<WideStep::Number> many{};
    if (widens)
        many = inputs_as<WideStep::Number>(product, memory);
    else
        few = inputs_as<typename Step::Number>(product, memory);
    const int64_t wide = widens ? product.width / WideStep::INPUTS * STEP : 0;
    for_each_block<Form>(product, wide, [&](const OutputBlock& block, const uint8_t* next, const uint8_t* end,
                                            uint8_t* memory) {
        if (widens)
            multiply<WideStep, WideForm<Form>>(product, widen<Form>(product, block, memory), many, next, end);
        else
            multiply<Step, Form>(product, block, few, next, end);
    });
}

// Multiplies codes by inputs that are rounded to bytes.
template <typename Form>
void multiply_bytes(const Product& product) {
    RoundedInputs rounded(product.rows, product.width, product.group);
#pragma omp parallel for num_threads(static_cast<int>(product.threads)) if (product.rows > ROWS_TOGETHER)
    for (int64_t row = 0; row < product.rows; ++row)
        rounded.round<Form>(product.inputs + row * product.width, row);
    const Inputs<int8_t> inputs = rounded.inputs();
    for_each_block<Form>(product, 0, [&](const OutputBlock& block, const uint8_t* next, const uint8_t* end, uint8_t*) {
        multiply<BytesStep<Form>, Form>(product, block, inputs, next, end);
    });
}

}  // namespace
