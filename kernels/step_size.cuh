// Covariance model → step size: src/covariance/ operation by operation, so that the bits agree.
#pragma once

#include "platform.cuh"

// sqrt(3) and sqrt(5), correctly rounded.
#define RFD_SQRT_3 1.7320508075688772
#define RFD_SQRT_5 2.23606797749979

// As src/covariance/rational_quadratic.rs: four reach rounding, the fifth is reserve.
#define RFD_NEWTON_ITERATIONS 5

// The step at (a, b), max(a, b) = 1, in length scales (paper, Table "RFD step size").
__device__ __forceinline__ double squared_exponential_step(double a, double b)
{
    if (a >= b) {
        const double r = b / a;
        return 1.0 / (sqrt(r * r / 4.0 + 1.0) + r / 2.0);
    }
    const double x = a / b;
    return x / (sqrt(0.25 + x * x) + 0.5);
}

__device__ __forceinline__ double matern32_step(double a, double b)
{
    return a / (RFD_SQRT_3 * a + 3.0 * b);
}

__device__ __forceinline__ double matern52_step(double a, double b)
{
    const double c = RFD_SQRT_5 * b / 3.0;
    const double sum = a + c;
    const double root = sqrt(4.0 * (a * a) + sum * sum);
    const double w = a >= c ? ((a - c) + root) / (2.0 * sum) : 2.0 * a / ((c - a) + root);
    return w / RFD_SQRT_5;
}

// Newton's iteration in y = u/α, α = min(1, √β), from the root of the quadratic part.
__device__ __forceinline__ double rational_quadratic_step(double a, double b, double beta)
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

__device__ __forceinline__ double closed_form_step(const RfdModel& model, double a, double b)
{
    switch (model.family) {
        case RFD_FAMILY_SQUARED_EXPONENTIAL: return squared_exponential_step(a, b);
        case RFD_FAMILY_RATIONAL_QUADRATIC: return rational_quadratic_step(a, b, model.beta);
        case RFD_FAMILY_MATERN32: return matern32_step(a, b);
        default: return matern52_step(a, b);
    }
}

// What pulls a step forward and back.
struct Forces {
    double a;      // s·p·‖g‖, times scale
    double b;      // q·(μ − loss), times scale
    double scale;  // a power of two that keeps both in the range of f64
    double theta;
};

__device__ __forceinline__ Forces forces_of(const RfdModel& model, double loss, double grad_norm,
                                            double inv_batch_size)
{
    const double quarter = 0.25, up = power_of_two(512), down = power_of_two(-512), small = 1e-150;
    // The signal shares of a mini-batch's loss and gradient.
    const double q = model.variance / (model.variance + model.noise_variance * inv_batch_size);
    const double p = model.grad_variance / (model.grad_variance + model.noise_grad_variance * inv_batch_size);
    double scale = 1.0, gap = model.mean - loss;
    if (!is_finite(gap)) {
        scale = quarter;
        grad_norm = grad_norm * quarter;
        gap = model.mean * quarter - loss * quarter;
    }
    double theta = (p * grad_norm) / (q * gap);
    if (theta != theta) {
        // 0/0: both products underflowed. The shares are at least 1e-100, so scaled up neither does.
        theta = (p * (grad_norm * up)) / (q * (gap * up));
    }
    double a = model.length_scale * (p * grad_norm), b = q * gap;
    const bool large = !is_finite(a);
    if (large || (a < small && b < small)) {
        const double factor = large ? down : up;
        scale *= factor;
        a = model.length_scale * (p * (grad_norm * factor));
        b = q * (gap * factor);
    }
    return {a, b, scale, theta};
}

// The minimiser of the conditional expectation, in length scales.
__device__ __forceinline__ double risk_neutral_step(const RfdModel& model, double a, double b)
{
    const double largest = a >= b ? a : b;
    const double u = closed_form_step(model, a / largest, b / largest);
    // Rounding must not lift a step over the plateau.
    return u <= model.plateau ? u : model.plateau;
}

// The step for loss < μ in length scales, without conservatism.
__device__ __forceinline__ double step_of_mode(const RfdModel& model, const Forces& forces)
{
    if (model.mode == RFD_MODE_RFD) {
        return risk_neutral_step(model, forces.a, forces.b);
    }
    const double asymptotic = forces.a / forces.b / model.slope;
    return model.mode == RFD_MODE_CLIPPED_A_RFD ? fmin(asymptotic, model.plateau) : asymptotic;
}
