// How the product of a query and a key becomes the exponent of a weight, which is a power of two.
#pragma once

#include <cmath>

#include "vectors.h"

class Exponents {
  public:
    explicit Exponents(const Call& call)
        : factor(call.softcap ? call.scale / call.softcap : call.scale * LOG2E), cap(call.softcap * LOG2E) {}

    bool capped() const { return cap != 0.0f; }

    // -inf, which stands for a hidden key, stays as it is.
    template <bool CAPPED>
    Floats of(Floats products) const {
        const Floats scaled = products * factor;
        if (!CAPPED) return scaled;
        return scaled > -HUGE_VALF ? tanh(scaled) * cap : scaled;
    }

    Floats operator()(Floats products) const { return capped() ? of<true>(products) : of<false>(products); }

  private:
    const float factor, cap;
};
