// What a processor computes and reads at most: products whose numbers never leave the registers, and a sum of large memory.
#include "numbers.h"

namespace {

using ::add_product;

// Codes of 6 bits, or fewer.
inline Words add_product(Words sum, Words codes, Words others) { return add_dots<63, 1>(sum, {codes}, {others}); }

constexpr int SUMS = REGISTERS == 32 ? 24 : 12;

struct Peak {
    int64_t threads;
    int64_t steps;         // of each thread's products
    const float* numbers;  // that are read
    int64_t count;         // of those, a multiple of 8 * LANES for each thread
    float* sums;           // [threads]; written so that nothing is left out
    int64_t operations;    // that each step has: written
};

// Keeps the compiler from taking a product for the last one's.
template <typename Vector>
void renew(Vector& vector) {
#if defined(__aarch64__)
    asm volatile("" : "+w"(vector));
#else
    asm volatile("" : "+v"(vector));
#endif
}

// Each thread adds products of vectors, of so many numbers in a lane, to as many sums as registers hold.
template <typename Sum, typename Factors>
void multiply(Peak* peak, int in_lane) {
    peak->operations = int64_t{2} * in_lane * LANES * SUMS;
#pragma omp parallel for num_threads(static_cast<int>(peak->threads))
    for (int64_t thread = 0; thread < peak->threads; ++thread) {
        Sum sums[SUMS];  // which differ, lest the compiler takes one for all
        for (int i = 0; i < SUMS; ++i) sums[i] = load<Sum>(peak->numbers + i * LANES);
        auto one = load<Factors>(peak->numbers);
        const auto other = load<Factors>(peak->numbers + LANES);
        for (int64_t step = 0; step < peak->steps; ++step)
#pragma GCC unroll 24
            for (int i = 0; i < SUMS; ++i) {
                sums[i] = add_product(sums[i], one, other);
                renew(one);
            }
        float total = 0.0f;
        for (const Sum& sum : sums) total += sum_of(sum);
        peak->sums[thread] = total;
    }
}

}  // namespace

extern "C" void kvlinker_peak_products(Peak* peak) { multiply<Floats, Numbers>(peak, IN_NUMBER); }

extern "C" void kvlinker_peak_bytes(Peak* peak) { multiply<Words, Words>(peak, 4); }

extern "C" void kvlinker_peak_reading(Peak* peak) {
    const int64_t share = peak->count / peak->threads;
#pragma omp parallel for num_threads(static_cast<int>(peak->threads))
    for (int64_t thread = 0; thread < peak->threads; ++thread) {
        Floats sums[8] = {};
        const float* numbers = peak->numbers + thread * share;
        for (int64_t at = 0; at < share; at += 8 * LANES)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sums[i] += load<Floats>(numbers + at + i * LANES);
        float total = 0.0f;
        for (const Floats& sum : sums) total += sum_of(sum);
        peak->sums[thread] = total;
    }
}
