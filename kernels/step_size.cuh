// Covariance model → step size: src/covariance/ operation by operation, so that the bits agree.
#pragma once

#include "families.cuh"

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
    const double quarter = 0.25, up = power_of_two(RFD_FORCE_EXPONENT),
                 down = power_of_two(-RFD_FORCE_EXPONENT), small = RFD_SMALL_FORCE;
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
    const double u = step_of_family(model.family, a / largest, b / largest, model.beta);
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
