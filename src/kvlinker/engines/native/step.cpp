// A step of a model: a list of operations that was recorded once, computed one after the other.
//
// Numbers lie token after token, in bf16 or fp32. Every operation rounds its results to what the model's own has there, so
// that both compute the same but for the order of sums and the last bits of powers. Products with weights and attention
// are computed by the functions of other files, whose addresses the list has; execution/compiled/bound_program.py has
// the same structures.
#include "norm_row.h"

namespace {

constexpr int64_t BLOCK = 64;             // rows of a weight in blocks; model/weights/blocks.py lays them out
constexpr int64_t FEW_NUMBERS = 1 << 14;  // that one thread computes

enum Kind : int64_t { COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE, SILU, GELU, GELU_TANH, RELU, TANH, SIGMOID, RSQRT, SQUARE,
                      CUBE, NEGATE, MEAN, RMS_NORM, LAYER_NORM, GATHER, PRODUCT, ATTENTION, ROOT, GATHER_BLOCKS,
                      GATHER_CODES };

// Numbers of each token: [tokens, outer, inner]. Strides count numbers; that of `inner` is 1, or 0 where all are one.
struct Operand {
    char* data;
    int64_t token, outer, inner;
    int64_t wide;  // 1: fp32; 0: bf16

    char* at(int64_t row, int64_t part) const { return data + (row * token + part * outer) * (wide ? 4 : 2); }
};

struct Operation {
    int64_t kind;
    int64_t behind_gather;  // 1: its rows are those whose logits are wanted; 0: all tokens
    int64_t outer, inner;
    Operand one, other, output;
    const bf16 *weight, *bias;  // of norms: [inner], or null
    NormForm norm;
    int64_t by_tokens;              // GATHER: 1: rows are those of the tokens' ids; 0: those whose logits are wanted
    void (*function)(const void*);  // PRODUCT, GATHER_CODES
    const void* argument;
    int64_t *argument_rows, *argument_threads;
    const int64_t** argument_ids;  // GATHER_CODES
    int64_t layer;  // ATTENTION
};

// One layer's attention. Numbers of tokens, and what they see, are filled in for each step.
struct Attention {
    Write write;
    Call call;
    int64_t writes;  // 0: keys and values are those of another layer
    int64_t rotary;  // which of the step's rotations; -1: none
};

// What all queries see in some layers.
struct Sight {
    const View* views;
    const Visit* visits;
    const Member* members;
    const Bundle* bundles;
    int64_t bundle_count;
};

struct Step {
    const Operation* operations;
    int64_t count;
    const Attention* layers;
    void (*write)(const Write*);
    void (*attend)(const Call*);
    int64_t rows, wanted;  // all tokens, and those whose logits are wanted
    const int64_t *ids, *positions, *slots, *wanted_rows;
    const Rotation* rotations;
    const Segment* segments;  // [layers, segment_count]
    int64_t segment_count;
    const Sight* sights;
    const int64_t* sight_of;  // [layers]
    int64_t threads;
};

inline Floats numbers_of(const Operand& operand, const char* row, int64_t first, int64_t left) {
    if (operand.wide) {
        const auto* numbers = reinterpret_cast<const float*>(row);
        return operand.inner ? load_some<Floats>(numbers + first, left) : floats(*numbers);
    }
    const auto* numbers = reinterpret_cast<const bf16*>(row);
    if (operand.inner) return load_bf16(numbers + first, left);
    return load_bf16(numbers, 1)[0] - Floats{};
}

inline void put(const Operand& operand, char* row, int64_t first, Floats numbers, int64_t left) {
    if (operand.wide)
        store_some(reinterpret_cast<float*>(row) + first, numbers, left);
    else
        store_bf16(reinterpret_cast<bf16*>(row) + first, numbers, left);
}

// Calls `compute(row, part)` for each part of each row.
template <typename Compute>
void each_part(const Operation& operation, int64_t rows, int64_t threads, Compute compute) {
    const int64_t parts = rows * operation.outer;
    const bool many = threads > 1 && parts > 1 && parts * operation.inner > FEW_NUMBERS;
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (many)
    for (int64_t i = 0; i < parts; ++i) compute(i / operation.outer, i % operation.outer);
}

template <typename Function>
void map_one(const Operation& operation, int64_t rows, int64_t threads, Function function) {
    each_part(operation, rows, threads, [&](int64_t row, int64_t part) {
        const char* one = operation.one.at(row, part);
        char* output = operation.output.at(row, part);
        for (int64_t i = 0; i < operation.inner; i += LANES) {
            const int64_t left = operation.inner - i;
            put(operation.output, output, i, function(numbers_of(operation.one, one, i, left)), left);
        }
    });
}

template <typename Function>
void map_two(const Operation& operation, int64_t rows, int64_t threads, Function function) {
    each_part(operation, rows, threads, [&](int64_t row, int64_t part) {
        const char *one = operation.one.at(row, part), *other = operation.other.at(row, part);
        char* output = operation.output.at(row, part);
        for (int64_t i = 0; i < operation.inner; i += LANES) {
            const int64_t left = operation.inner - i;
            const Floats x = numbers_of(operation.one, one, i, left), y = numbers_of(operation.other, other, i, left);
            put(operation.output, output, i, function(x, y), left);
        }
    });
}

inline Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

// e^x with the error of fp32, as PyTorch has it: what is rounded to bf16 afterwards should be the same.
inline Floats precise_exp(Floats x) {
    x = x * LOG2E;
    x = x < -126.0f ? floats(-126.0f) : x;
    x = x > 127.0f ? floats(127.0f) : x;
    const Words whole = __builtin_convertvector(x + (x < 0.0f ? floats(-0.5f) : floats(0.5f)), Words);
    const Floats left = x - __builtin_convertvector(whole, Floats);  // of at most half
    Floats power = floats(1.52527338e-5f);
    power = power * left + 1.54035304e-4f;
    power = power * left + 1.33335581e-3f;
    power = power * left + 9.61812911e-3f;
    power = power * left + 5.55041087e-2f;
    power = power * left + 2.40226507e-1f;
    power = power * left + 6.93147181e-1f;
    power = power * left + 1.0f;
    return (Floats)((Words)power + (whole << 23));
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + precise_exp(-x)); }

// Also near 0, where what is left of 1 - 2 / (e^2x + 1) has few bits.
inline Floats precise_tanh(Floats x) {
    const Floats square = x * x;
    const Floats near = x * (1.0f - square * (1.0f / 3.0f) * (1.0f - square * 0.4f));
    return magnitude(x) < 0.05f ? near : 1.0f - 2.0f / (precise_exp(2.0f * x) + 1.0f);
}

// erf, with an error of up to 1.5e-7: Abramowitz and Stegun, 7.1.26.
inline Floats erf(Floats x) {
    const Floats size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size);
    Floats sum = floats(1.061405429f);
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const Floats value = 1.0f - sum * t * precise_exp(-size * size);
    return x < 0.0f ? -value : value;
}

inline Floats gelu(Floats x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }

inline Floats gelu_tanh(Floats x) {
    return 0.5f * x * (1.0f + precise_tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

inline Floats square_root(Floats x) {
    for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
    return x;
}

template <typename Function>
float sum_over(const Operand& operand, const char* row, int64_t count, Function function) {
    Floats sum{};
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i;
        const Floats found = function(numbers_of(operand, row, i, left));
        sum += counted() < static_cast<int32_t>(std::min<int64_t>(left, LANES)) ? found : Floats{};
    }
    return sum_of(sum);
}

void mean(const Operation& operation, int64_t rows, int64_t threads) {
    each_part(operation, rows, threads, [&](int64_t row, int64_t part) {
        const float sum = sum_over(operation.one, operation.one.at(row, part), operation.inner, [](Floats x) { return x; });
        put(operation.output, operation.output.at(row, part), 0, floats(sum / static_cast<float>(operation.inner)), 1);
    });
}

void rms_norm(const Operation& operation, int64_t rows, int64_t threads) {
    each_part(operation, rows, threads, [&](int64_t row, int64_t part) {
        norm_row(operation.norm, reinterpret_cast<const bf16*>(operation.one.at(row, part)), operation.weight,
                 operation.inner, reinterpret_cast<bf16*>(operation.output.at(row, part)));
    });
}

void layer_norm(const Operation& operation, int64_t rows, int64_t threads) {
    const auto count = static_cast<float>(operation.inner);
    each_part(operation, rows, threads, [&](int64_t row, int64_t part) {
        const char* inputs = operation.one.at(row, part);
        char* output = operation.output.at(row, part);
        const float middle = sum_over(operation.one, inputs, operation.inner, [](Floats x) { return x; }) / count;
        const float spread = sum_over(operation.one, inputs, operation.inner, [&](Floats x) {
            return (x - middle) * (x - middle);
        });
        const float factor = 1.0f / std::sqrt(spread / count + operation.norm.epsilon);
        for (int64_t i = 0; i < operation.inner; i += LANES) {
            const int64_t left = operation.inner - i;
            Floats normed = (numbers_of(operation.one, inputs, i, left) - middle) * factor;
            if (operation.weight) normed *= load_bf16(operation.weight + i, left);
            if (operation.bias) normed += load_bf16(operation.bias + i, left);
            put(operation.output, output, i, normed, left);
        }
    });
}

void gather(const Operation& operation, int64_t rows, const int64_t* chosen) {
    const int64_t bytes = operation.inner * (operation.output.wide ? 4 : 2);
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(operation.output.at(row, 0), operation.one.at(chosen[row], 0), bytes);
}

// Rows of a weight in bf16 that lies in blocks of pairs: [blocks, inner / 2, BLOCK, 2].
void gather_blocks(const Operation& operation, int64_t rows, const int64_t* chosen) {
    constexpr int64_t PAIR = 2 * sizeof(bf16);
    const int64_t pairs = operation.inner / 2;
    for (int64_t row = 0; row < rows; ++row) {
        const char* from = operation.one.data + (chosen[row] / BLOCK * pairs * BLOCK + chosen[row] % BLOCK) * PAIR;
        char* to = operation.output.at(row, 0);
        for (int64_t pair = 0; pair < pairs; ++pair, to += PAIR, from += BLOCK * PAIR) std::memcpy(to, from, PAIR);
    }
}

void attend(const Step& step, int64_t layer) {
    Attention attention = step.layers[layer];
    const Rotation rotation = attention.rotary < 0 ? Rotation{} : step.rotations[attention.rotary];
    if (attention.writes) {
        Write& write = attention.write;
        write.key.rows = write.value.rows = step.rows;
        write.positions = step.positions;
        write.slots = step.slots;
        write.rotation = rotation;
        write.threads = step.threads;
        step.write(&write);
    }
    const Sight& sight = step.sights[step.sight_of[layer]];
    Call& call = attention.call;
    call.query.rows = call.output.rows = step.rows;
    call.positions = step.positions;
    call.rotation = rotation;
    call.segments = step.segments + layer * step.segment_count;
    call.views = sight.views;
    call.visits = sight.visits;
    call.members = sight.members;
    call.bundles = sight.bundles;
    call.bundle_count = sight.bundle_count;
    call.threads = step.threads;
    step.attend(&call);
}

void compute(const Step& step, const Operation& operation) {
    const int64_t rows = operation.behind_gather ? step.wanted : step.rows, threads = step.threads;
    if (!rows) return;
    const auto one = [&](auto function) { map_one(operation, rows, threads, function); };
    const auto two = [&](auto function) { map_two(operation, rows, threads, function); };
    switch (static_cast<Kind>(operation.kind)) {
        case COPY: return one([](Floats x) { return x; });
        case ADD: return two([](Floats x, Floats y) { return x + y; });
        case SUBTRACT: return two([](Floats x, Floats y) { return x - y; });
        case MULTIPLY: return two([](Floats x, Floats y) { return x * y; });
        case DIVIDE: return two([](Floats x, Floats y) { return x / y; });
        case SILU: return one([](Floats x) { return x / (1.0f + precise_exp(-x)); });
        case GELU: return one(gelu);
        case GELU_TANH: return one(gelu_tanh);
        case RELU: return one([](Floats x) { return larger(x, Floats{}); });
        case TANH: return one(precise_tanh);
        case SIGMOID: return one(sigmoid);
        case ROOT: return one(square_root);
        case RSQRT: return one([](Floats x) { return 1.0f / square_root(x); });
        case SQUARE: return one([](Floats x) { return x * x; });
        case CUBE:  // as PyTorch does it, which rounds twice
            return one([&](Floats x) { return (operation.output.wide ? x * x : widened(rounded(x * x))) * x; });
        case NEGATE: return one([](Floats x) { return -x; });
        case MEAN: return mean(operation, rows, threads);
        case RMS_NORM: return rms_norm(operation, rows, threads);
        case LAYER_NORM: return layer_norm(operation, rows, threads);
        case GATHER: return gather(operation, rows, operation.by_tokens ? step.ids : step.wanted_rows);
        case GATHER_BLOCKS: return gather_blocks(operation, rows, step.ids);
        case GATHER_CODES:
            *operation.argument_ids = step.ids;
            [[fallthrough]];
        case PRODUCT:
            *operation.argument_rows = rows;
            *operation.argument_threads = threads;
            return operation.function(operation.argument);
        case ATTENTION: return attend(step, operation.layer);
    }
}

}  // namespace

extern "C" void kvlinker_step(const Step* step) {
    for (int64_t i = 0; i < step->count; ++i) compute(*step, step->operations[i]);
}
