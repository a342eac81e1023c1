// Rows times a matrix of weights in bf16, 8 or 4 bits. With few rows, reading the weights is most of the work.
//
// Outputs lie in blocks of 64. A block is a sequence of groups of inputs; a group has a header and then steps of 64 words,
// one for each output. A word has 16 bits for each input of a pair, the first one's low: in bf16 its weight, so that a
// block is what oneDNN makes of it; in 8 bits the codes of that input of two pairs, in 4 bits those of four, the first
// pair's lowest.
//
// Where the processor multiplies bf16, weights and inputs meet in pairs of bf16; elsewhere in fp32. For few rows weights
// are widened in registers, each time; for more rows a block is widened once for all of them.
#include "product_steps.h"

namespace {

constexpr int CACHE_LINE = 64;                         // bytes
constexpr int ROWS_TOGETHER = 6;
constexpr int SUMS = REGISTERS == 32 ? 24 : 12;        // vectors that are added to at once
constexpr int FETCHES_AHEAD_FROM = 4 * ROWS_TOGETHER;  // rows

struct Product {
    const bf16* inputs;  // [rows, width]
    int64_t rows, width;
    const uint8_t* weights;
    int64_t outputs, group;  // of inputs; the whole width but in 4 bits
    const bf16* bias;        // [outputs], or null
    bf16* output;            // [rows, outputs]
    int64_t threads;

    int64_t groups() const { return width / group; }
};

// A block's weights; strides are in bytes, from group to group.
struct OutputBlock {
    int64_t first;  // output
    const uint8_t *weights, *headers;
    int64_t weight_stride, header_stride;
};

// Inputs of all rows, and what is needed beside them.
template <typename Number>
struct Inputs {
    const Number* numbers;  // [rows, width]
    const float* sums;      // [rows, groups], or null where they do not matter
};

// The vectors of a block's outputs that are added to at once for so many rows.
constexpr int panel_of(int rows) {
    int vectors = VECTORS;
    while (vectors > 1 && vectors * rows > SUMS) vectors /= 2;
    return vectors;
}

// Computes a block's outputs of ROWS rows. The line that is so many bytes ahead of each step's weights is fetched
// meanwhile.
template <typename Step, typename Form, int ROWS>
void multiply(const Product& product, const OutputBlock& block, const Inputs<typename Step::Number>& inputs,
              int64_t first_row, int64_t ahead) {
    constexpr int PANEL = panel_of(ROWS);
    const int64_t groups = product.groups();
    for (int first = 0; first < VECTORS; first += PANEL) {
        const auto* numbers = inputs.numbers + first_row * product.width;
        Floats totals[ROWS][PANEL] = {};
        for (int64_t group = 0; group < groups; ++group) {
            const uint8_t* at = block.weights + group * block.weight_stride;
            const uint8_t* header = block.headers + group * block.header_stride;
            Floats sums[ROWS][PANEL];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
                for (int v = 0; v < PANEL; ++v) sums[row][v] = Floats{};
            for (int64_t step = 0; step < product.group / Step::INPUTS; ++step) {
                __builtin_prefetch(at + ahead, 0, 2);
                Step::template add<ROWS, PANEL>(sums, at + first * VECTOR, numbers, product.width);
                at += STEP;
                numbers += Step::INPUTS;
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
                for (int v = 0; v < PANEL; ++v)
                    totals[row][v] = Form::scaled(totals[row][v], sums[row][v], header, first + v,
                                                  inputs.sums ? inputs.sums[(first_row + row) * groups + group] : 0.0f);
        }
        for (int v = 0; v < PANEL; ++v) {
            const int64_t output = block.first + (first + v) * LANES, left = product.outputs - output;
            const Floats bias = product.bias ? load_bf16(product.bias + output, left) : Floats{};
            for (int row = 0; row < ROWS; ++row)
                store_bf16(product.output + (first_row + row) * product.outputs + output, totals[row][v] + bias, left);
        }
    }
}

// The rows of a pass over a block's weights find these in the cache, but for those of the first pass. So the passes behind
// it, where there are enough of them, fetch the next block, whose weights follow: each a quarter of its lines.
template <typename Form>
int64_t bytes_ahead(const Product& product, const OutputBlock& block, int64_t pass) {
    constexpr int LINES = STEP / CACHE_LINE;
    if (Form::HEADER || block.weights != block.headers || product.rows < FETCHES_AHEAD_FROM || pass < 1 || pass > LINES)
        return 0;
    return product.groups() * block.weight_stride + (pass - 1) * CACHE_LINE;
}

template <typename Step, typename Form>
void multiply(const Product& product, const OutputBlock& block, const Inputs<typename Step::Number>& inputs) {
    for (int64_t row = 0; row < product.rows; row += ROWS_TOGETHER) {
        const int64_t ahead = bytes_ahead<Form>(product, block, row / ROWS_TOGETHER);
        switch (product.rows - row) {
            case 1: multiply<Step, Form, 1>(product, block, inputs, row, ahead); break;
            case 2: multiply<Step, Form, 2>(product, block, inputs, row, ahead); break;
            case 3: multiply<Step, Form, 3>(product, block, inputs, row, ahead); break;
            case 4: multiply<Step, Form, 4>(product, block, inputs, row, ahead); break;
            case 5: multiply<Step, Form, 5>(product, block, inputs, row, ahead); break;
            default: multiply<Step, Form, ROWS_TOGETHER>(product, block, inputs, row, ahead);
        }
    }
}

// Writes the block's weights to `wide` as WideStep takes them, fp32 scaled, and returns the block that these are.
template <typename Form>
OutputBlock widen(const Product& product, const OutputBlock& block, uint8_t* wide) {
    OutputBlock widened = block;
    widened.weights = wide;
    widened.weight_stride = product.group / WideStep::INPUTS * STEP;
    for (int64_t group = 0; group < product.groups(); ++group) {
        const uint8_t* at = block.weights + group * block.weight_stride;
        const uint8_t* header = block.headers + group * block.header_stride;
        for (int64_t step = 0; step < product.group / (2 * Form::PAIRS); ++step, at += STEP)
#pragma GCC unroll 4
            for (int pair = 0; pair < Form::PAIRS; ++pair, wide += 2 / WideStep::INPUTS * STEP)
                for (int v = 0; v < VECTORS; ++v) {
                    const Words words = load<Words>(at + v * VECTOR);
                    const Floats first = Form::numbers_of(words, pair, 0), second = Form::numbers_of(words, pair, 1);
                    if constexpr (MULTIPLIES_BF16) {
                        store(wide + v * VECTOR, pairs_of(first, second));
                    } else {
                        store(wide + v * VECTOR, Form::scaled(Floats{}, first, header, v, 1.0f));
                        store(wide + STEP + v * VECTOR, Form::scaled(Floats{}, second, header, v, 1.0f));
                    }
                }
    }
    return widened;
}

template <typename Form>
OutputBlock block_at(const Product& product, int64_t index) {
    const int64_t stride = Form::HEADER + product.group / (2 * Form::PAIRS) * STEP;
    const uint8_t* headers = product.weights + index * product.groups() * stride;
    return {index * BLOCK, headers + Form::HEADER, headers, stride, stride};
}

// The inputs as a step takes them; memory for those that are widened.
template <typename Number>
const Number* inputs_as(const Product& product, std::unique_ptr<float, Free>& memory) {
    if constexpr (std::is_same_v<Number, bf16>) {
        return product.inputs;
    } else {
        if (memory) return memory.get();
        memory = allocate<float>(product.rows * product.width);
#pragma omp parallel for num_threads(static_cast<int>(product.threads)) if (product.rows > ROWS_TOGETHER)
        for (int64_t row = 0; row < product.rows; ++row)
            for (int64_t input = 0; input < product.width; input += LANES) {
                const int64_t at = row * product.width + input, left = product.width - input;
                store_some(memory.get() + at, load_bf16(product.inputs + at, left), left);
            }
        return memory.get();
    }
}

template <typename Form>
void multiply(const Product& product, const float* sums) {
    using Step = StepOf<Form>;
    std::unique_ptr<float, Free> memory;
    const bool widens = product.rows >= Form::WIDENED_FROM;
    Product whole = product;
    if (!MULTIPLIES_BF16) whole.group = product.width;
    Inputs<typename Step::Number> few{nullptr, sums};
    Inputs<WideStep::Number> many{nullptr, sums};
    if (widens)
        many.numbers = inputs_as<WideStep::Number>(product, memory);
    else
        few.numbers = inputs_as<typename Step::Number>(product, memory);
    const int64_t blocks = round_up(product.outputs, BLOCK) / BLOCK;
#pragma omp parallel num_threads(static_cast<int>(product.threads))
    {
        const auto wide = allocate<uint8_t>(widens ? product.width / WideStep::INPUTS * STEP : 1);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < blocks; ++index) {
            const OutputBlock block = block_at<Form>(product, index);
            if (widens)
                multiply<WideStep, WideForm<Form>>(whole, widen<Form>(product, block, wide.get()), many);
            else
                multiply<Step, Form>(product, block, few);
        }
    }
}

// The sum of each group of each row's inputs: [rows, groups].
std::unique_ptr<float, Free> sums_of_inputs(const Product& product) {
    auto sums = allocate<float>(product.rows * product.groups());
    for (int64_t i = 0; i < product.rows * product.groups(); ++i) {
        Floats sum{};
        for (int64_t input = 0; input < product.group; input += LANES)
            sum += load_bf16(product.inputs + i * product.group + input);
        sums.get()[i] = sum_of(sum);
    }
    return sums;
}

}  // namespace

extern "C" {

void kvlinker_multiply_bf16(const Product* product) { multiply<InBf16>(*product, nullptr); }

void kvlinker_multiply_int8(const Product* product) { multiply<In8Bits>(*product, nullptr); }

// The group is a multiple of 16.
void kvlinker_multiply_int4(const Product* product) { multiply<In4Bits>(*product, sums_of_inputs(*product).get()); }
}
