// Covariance model → step size: src/covariance/ operation by operation, so that the bits agree.
#pragma once

#include "families.cuh"

// What pulls a step forward and back.
struct Forces {
    double a;      // s·p·‖g‖, times scale
    double b;      // q·(μ − loss), times scale
    double scale;  // a power of two that keeps both in the range of f64
};

// The signal shares of a mini-batch's loss and gradient.
struct Shares {
    double q, p;

    Shares() = default;
    __device__ __forceinline__ Shares(const RfdModel& model, double inv_batch_size)
        : q(model.variance / (model.variance + model.noise_variance * inv_batch_size)),
          p(model.grad_variance / (model.grad_variance + model.noise_grad_variance * inv_batch_size))
    {
    }
};

// How far the loss lies below the mean, and the gradient's norm, both scaled to keep the first finite.
struct Observed {
    double scale, gap, grad_norm;

    __device__ __forceinline__ Observed(const RfdModel& model, double loss, double norm)
        : scale(1.0), gap(model.mean - loss), grad_norm(norm)
    {
        if (!is_finite(gap)) {
            const double quarter = 0.25;
            scale = quarter;
            grad_norm = grad_norm * quarter;
            gap = model.mean * quarter - loss * quarter;
        }
    }
};

__device__ __forceinline__ double theta_of(const Shares& shares, const Observed& observed)
{
    const double up = power_of_two(RFD_FORCE_EXPONENT);
    const double theta = (shares.p * observed.grad_norm) / (shares.q * observed.gap);
    // 0/0: both products underflowed. The shares are at least 1e-100, so scaled up neither does.
    return theta != theta ? (shares.p * (observed.grad_norm * up)) / (shares.q * (observed.gap * up)) : theta;
}

__device__ __forceinline__ Forces forces_of(const RfdModel& model, const Shares& shares, const Observed& observed)
{
    const double up = power_of_two(RFD_FORCE_EXPONENT), down = power_of_two(-RFD_FORCE_EXPONENT),
                 small = RFD_SMALL_FORCE, p = shares.p, q = shares.q, gap = observed.gap,
                 grad_norm = observed.grad_norm;
    double scale = observed.scale, a = model.length_scale * (p * grad_norm), b = q * gap;
    const bool large = !is_finite(a);
    if (large || (a < small && b < small)) {
        const double factor = large ? down : up;
        scale *= factor;
        a = model.length_scale * (p * (grad_norm * factor));
        b = q * (gap * factor);
    }
    return {a, b, scale};
}

// The minimiser of the conditional expectation, in length scales.
__device__ __forceinline__ double risk_neutral_step(const RfdModel& model, double a, double b)
{
    // The larger one over itself is 1.
    const double ratio = a >= b ? b / a : a / b;
    const double u = step_of_family(model.family, a >= b ? 1.0 : ratio, a >= b ? ratio : 1.0, model.beta);
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
