// The covariance families: the step and the profile of each, as src/covariance/ has them. Steps agree with
// the host bit for bit; profiles, for conservative steps, to about 1e-9, because of their exponentials.
//
// A new family is a struct here and a line in RFD_FAMILIES (abi.h).
#pragma once

#include "platform.cuh"

// A covariance at one distance u: ρ, 1 − ρ, κ = ρ'(u²/2)/ρ'(0), (uκ)', D = 1 − ρ² − u²ρ'²/(−ρ'(0)), D'.
struct Profile {
    double rho, drop, kappa, ukappa_slope, unexplained, unexplained_slope;
};

// e⁻ᶻ·Σ_{k≥n} zᵏ/k!
__device__ inline double exp_tail(int n, double z)
{
    double term = 1.0;
    if (z < n + 2.0) {
        for (int k = 1; k <= n; ++k) {
            term = term * z / k;
        }
        double sum = term;
        for (int k = n + 1; term > sum * (0.25 * RFD_F64_EPSILON); ++k) {
            term = term * z / k;
            sum += term;
        }
        return sum * exp(-z);
    }
    double head = 0.0;
    for (int k = 0; k < n; ++k) {
        head += term;
        term = term * z / (k + 1);
    }
    return 1.0 - head * exp(-z);
}

// ln(1 + x) − x for x ≥ 0 without cancellation.
__device__ inline double ln_1p_minus(double x)
{
    if (x > 0.5) {
        return log1p(x) - x;
    }
    const double s = x / (2.0 + x), s2 = s * s;
    double series = 0.0;
    for (int k = 11; k >= 0; --k) {
        series = series * s2 + 1.0 / (2 * k + 3);
    }
    return 2.0 * s * s2 * series - s * x;
}

// `step` is the one at (a, b), max(a, b) = 1, in length scales (paper, Table "RFD step size"); `profile` that
// at a distance of u length scales. β is the model's shape, for families that have one.
struct SquaredExponential {
    static __device__ __forceinline__ double step(double a, double b, double)
    {
        if (a >= b) {
            // The larger one, by which the smaller would be divided, is 1.
            return 1.0 / (sqrt(b * b / 4.0 + 1.0) + b / 2.0);
        }
        return a / (sqrt(0.25 + a * a) + 0.5);
    }

    static __device__ inline Profile profile(double u, double)
    {
        const double t = fmin(u * u, RFD_VANISHED);
        const double rho = exp(-t / 2.0);
        return {rho, -expm1(-t / 2.0), rho, (1.0 - t) * rho, exp_tail(2, t), 2.0 * sqrt(t) * t * exp(-t)};
    }
};

struct RationalQuadratic {
    // Newton's iteration in y = u/α, α = min(1, √β), from the root of the quadratic part.
    static __device__ __forceinline__ double step(double a, double b, double beta)
    {
        double alpha = 1.0, square = 1.0 + 1.0 / beta, cube = 1.0 / beta;
        if (beta <= 1.0) {
            alpha = sqrt(beta);
            square = 1.0 + beta;
            cube = 1.0;
        }
        double linear = b * alpha;
        const double largest = a >= linear ? a : linear;
        a = a / largest;
        linear = linear / largest;
        square = a * square;
        cube = linear * cube;
        double y = 2.0 * a / (linear + sqrt(linear * linear + 4.0 * (a * square)));
#pragma unroll 1
        for (int i = 0; i < RFD_NEWTON_ITERATIONS; ++i) {
            const double value = ((cube * y + square) * y + linear) * y - a;
            const double slope = (3.0 * cube * y + 2.0 * square) * y + linear;
            y -= value / slope;
        }
        return alpha * y;
    }

    static __device__ inline Profile profile(double u, double beta)
    {
        const double tau = u * u / beta, log = log1p(tau);
        const double rho = exp(-beta / 2.0 * log), kappa = rho / (1.0 + tau);
        const double relative = tau / (1.0 + tau), bend = beta * (relative / (1.0 + tau));
        const double log_explained =
            tau < 0.5
                ? -beta * ln_1p_minus(tau) + ln_1p_minus(bend) - beta * tau * relative * ((2.0 + tau) / (1.0 + tau))
                : -beta * log + log1p(bend);
        return {rho,
                -expm1(-beta / 2.0 * log),
                kappa,
                kappa * ((1.0 - u * u * (1.0 + 1.0 / beta)) / (1.0 + tau)),
                -expm1(log_explained),
                2.0 * u * (kappa * kappa) * relative * (3.0 + beta + tau)};
    }
};

struct Matern32 {
    static __device__ __forceinline__ double step(double a, double b, double)
    {
        return a / (RFD_SQRT_3 * a + 3.0 * b);
    }

    static __device__ inline Profile profile(double u, double)
    {
        const double w = fmin(RFD_SQRT_3 * u, RFD_VANISHED), z = 2.0 * w;
        const double kappa = exp(-w);
        return {(1.0 + w) * kappa, exp_tail(2, w), kappa, (1.0 - w) * kappa, exp_tail(3, z),
                2.0 * RFD_SQRT_3 * (z * z / 2.0) * exp(-z)};
    }
};

struct Matern52 {
    static __device__ __forceinline__ double step(double a, double b, double)
    {
        const double c = RFD_SQRT_5 * b / 3.0;
        const double sum = a + c;
        const double root = sqrt(4.0 * (a * a) + sum * sum);
        const double w = a >= c ? ((a - c) + root) / (2.0 * sum) : 2.0 * a / ((c - a) + root);
        return w / RFD_SQRT_5;
    }

    static __device__ inline Profile profile(double u, double)
    {
        const double w = fmin(RFD_SQRT_5 * u, RFD_VANISHED), z = 2.0 * w;
        const double exp_w = exp(-w), exp_z = exp(-z), z3 = z * z * z;
        return {(1.0 + w + w * w / 3.0) * exp_w,
                w * w / 6.0 * exp_w + exp_tail(3, w),
                (1.0 + w) * exp_w,
                (1.0 + w - w * w) * exp_w,
                z3 * z / 72.0 * exp_z + exp_tail(5, z),
                2.0 * RFD_SQRT_5 * (z3 / 18.0 + z3 * z / 36.0) * exp_z};
    }
};

// Whether a number is a family's. A step with any other is refused before its family matters.
__device__ __forceinline__ bool is_family(uint32_t number)
{
#define RFD_FAMILY_IS(NAME, NUMBER, STRUCT) number == NUMBER ||
    return RFD_FAMILIES(RFD_FAMILY_IS) false;
#undef RFD_FAMILY_IS
}

__device__ __forceinline__ double step_of_family(uint32_t family, double a, double b, double beta)
{
    switch (family) {
#define RFD_FAMILY_STEP(NAME, NUMBER, STRUCT) \
    case NUMBER: return STRUCT::step(a, b, beta);
        RFD_FAMILIES(RFD_FAMILY_STEP)
#undef RFD_FAMILY_STEP
    }
    return 0.0;
}

__device__ inline Profile profile_of_family(uint32_t family, double u, double beta)
{
    switch (family) {
#define RFD_FAMILY_PROFILE(NAME, NUMBER, STRUCT) \
    case NUMBER: return STRUCT::profile(u, beta);
        RFD_FAMILIES(RFD_FAMILY_PROFILE)
#undef RFD_FAMILY_PROFILE
    }
    return {};
}
