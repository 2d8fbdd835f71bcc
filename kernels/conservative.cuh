// Conservative steps: the global minimum of the upper confidence bound, searched by all threads of a block together.
// Follows src/covariance/search.rs; its exponentials make the result agree to about 1e-9, not bit for bit.
#pragma once

#include "step_size.cuh"

// Points of the grid per factor e.
#define RFD_POINTS_PER_E 10.0
// The grid starts this far below the shortest length at which the objective can turn.
#define RFD_MARGIN 1e-3
// No step is looked for below.
#define RFD_SHORTEST 1e-300
// Beyond this argument e⁻ˣ times a power of x is 0; capping x keeps ∞·0 away.
#define RFD_VANISHED 1e4
// Of Chandrupatla's method; some 50 bisections would do.
#define RFD_ROOT_ITERATIONS 120

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

__device__ inline Profile squared_exponential_profile(double u)
{
    const double t = fmin(u * u, RFD_VANISHED);
    const double rho = exp(-t / 2.0);
    return {rho, -expm1(-t / 2.0), rho, (1.0 - t) * rho, exp_tail(2, t), 2.0 * sqrt(t) * t * exp(-t)};
}

__device__ inline Profile matern32_profile(double u)
{
    const double w = fmin(RFD_SQRT_3 * u, RFD_VANISHED), z = 2.0 * w;
    const double kappa = exp(-w);
    return {(1.0 + w) * kappa, exp_tail(2, w), kappa, (1.0 - w) * kappa, exp_tail(3, z),
            2.0 * RFD_SQRT_3 * (z * z / 2.0) * exp(-z)};
}

__device__ inline Profile matern52_profile(double u)
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

__device__ inline Profile rational_quadratic_profile(double u, double beta)
{
    const double tau = u * u / beta, log = log1p(tau);
    const double rho = exp(-beta / 2.0 * log), kappa = rho / (1.0 + tau);
    const double relative = tau / (1.0 + tau), bend = beta * (relative / (1.0 + tau));
    const double log_explained =
        tau < 0.5 ? -beta * ln_1p_minus(tau) + ln_1p_minus(bend) - beta * tau * relative * ((2.0 + tau) / (1.0 + tau))
                  : -beta * log + log1p(bend);
    return {rho,
            -expm1(-beta / 2.0 * log),
            kappa,
            kappa * ((1.0 - u * u * (1.0 + 1.0 / beta)) / (1.0 + tau)),
            -expm1(log_explained),
            2.0 * u * (kappa * kappa) * relative * (3.0 + beta + tau)};
}

// F(u) = −b·ρ − a·u·κ + z·√v, with v the conditional variance divided by C(0).
struct Objective {
    double a, b, z;
    double loss_noise;      // C_ε(0)/(b·C(0))
    double gradient_noise;  // C'_ε(0)/(b·C'(0))
    double slope;           // −ρ'(0)
    double plateau;
    double beta;
    uint32_t family;

    __device__ inline Objective(const RfdModel& model, const Forces& forces, double inv_batch_size)
        : loss_noise(model.noise_variance / model.variance * inv_batch_size),
          gradient_noise(model.noise_grad_variance / model.grad_variance * inv_batch_size),
          slope(model.slope),
          plateau(model.plateau),
          beta(model.beta),
          family(model.family)
    {
        const double quantile = model.quantile * (sqrt(model.variance) * forces.scale);
        const double largest = fmax(fmax(forces.a, forces.b), quantile);
        a = forces.a / largest;
        b = forces.b / largest;
        z = quantile / largest;
    }

    // Not inlined: the profiles of four families, in each of the five places that need one, would be most of the kernel.
    __device__ __noinline__ Profile profile(double u) const
    {
        switch (family) {
            case RFD_FAMILY_SQUARED_EXPONENTIAL: return squared_exponential_profile(u);
            case RFD_FAMILY_RATIONAL_QUADRATIC: return rational_quadratic_profile(u, beta);
            case RFD_FAMILY_MATERN32: return matern32_profile(u);
            default: return matern52_profile(u);
        }
    }

    __device__ inline double q() const { return 1.0 / (1.0 + loss_noise); }
    __device__ inline double p() const { return 1.0 / (1.0 + gradient_noise); }

    __device__ inline double variance(const Profile& at, double u) const
    {
        const double ukappa = u * at.kappa;
        return at.unexplained + loss_noise * q() * (at.rho * at.rho) + gradient_noise * p() * (slope * ukappa * ukappa);
    }

    // F'(u) for u > 0.
    __device__ inline double derivative(double u) const
    {
        const Profile at = profile(u);
        const double ukappa = u * at.kappa;
        const double mean = b * slope * u * at.kappa - a * at.ukappa_slope;
        const double v = variance(at, u);
        if (v <= 0.0) {
            // Only a profile rounded to 0 gets here: the deviation is too small to matter.
            return mean;
        }
        const double w_slope = 2.0 * slope * ukappa * at.ukappa_slope;
        const double v_slope = q() * at.unexplained_slope + (gradient_noise - loss_noise) * q() * p() * w_slope;
        return mean + z * v_slope / (2.0 * sqrt(v));
    }

    // F(u) − F(0), accurate also where it is tiny against F(0).
    __device__ inline double change(double u) const
    {
        const Profile at = profile(u);
        const double ukappa = u * at.kappa;
        const double mean = b * at.drop - a * u * at.kappa;
        const double start = loss_noise / (1.0 + loss_noise);
        const double deviations = sqrt(fmax(variance(at, u), 0.0)) + sqrt(start);
        if (deviations == 0.0) {
            return mean;
        }
        const double growth =
            q() * at.unexplained + (gradient_noise - loss_noise) * q() * p() * (slope * ukappa * ukappa);
        return mean + z * (growth / deviations);
    }

    // A lower bound, up to a factor, for the lengths at which F' can change its sign.
    __device__ inline double shortest_turn() const
    {
        const double pull = a * plateau;
        const double mean_bend = b * slope * plateau * plateau;
        const double start = sqrt(loss_noise * q());
        const double growth = fabs(gradient_noise - loss_noise) * q() * p() * (slope * plateau * plateau);
        const double balance = fabs(pull - z * sqrt(growth));
        const double turns[] = {pull / z,    (pull / z) * (pull / z),       pull / mean_bend,
                                balance / z, (balance / z) * (balance / z), balance / mean_bend,
                                pull * start / (z * growth), start / sqrt(growth)};
        double shortest = 1.0;
        for (double turn : turns) {
            shortest = turn > 0.0 ? fmin(shortest, turn) : shortest;
        }
        return shortest * plateau;
    }

    // The root of F' between two points where its signs differ, by Chandrupatla's method: inverse quadratic interpolation
    // where it is safe, bisection otherwise.
    __device__ inline double root(double left, double left_value, double right, double right_value) const
    {
        double x1 = right, f1 = right_value, x2 = left, f2 = left_value, position = 0.5;
        for (int i = 0; i < RFD_ROOT_ITERATIONS; ++i) {
            const double x = x1 + position * (x2 - x1);
            const double value = derivative(x);
            double x3 = x2, f3 = f2;
            if ((value >= 0.0) == (f1 >= 0.0)) {
                x3 = x1, f3 = f1;
            } else {
                x2 = x1, f2 = f1;
            }
            x1 = x, f1 = value;
            const bool first = fabs(f1) < fabs(f2);
            const double best = first ? x1 : x2, least = first ? f1 : f2;
            const double smallest = RFD_F64_EPSILON * fabs(best) / fabs(x2 - x1);
            // Also true for NaN.
            if (least == 0.0 || !(smallest < 0.5)) {
                return best;
            }
            const double xi = (x1 - x2) / (x3 - x2), phi = (f1 - f2) / (f3 - f2);
            position = 0.5;
            if (phi * phi < xi && (1.0 - phi) * (1.0 - phi) < 1.0 - xi) {
                position = f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2);
            }
            position = position < smallest ? smallest : position > 1.0 - smallest ? 1.0 - smallest : position;
        }
        return fabs(f1) < fabs(f2) ? x1 : x2;
    }
};

// A local minimum; the first of equally good ones counts, as in a search from left to right.
struct Minimum {
    double u, change;
    uint64_t cell;

    __device__ __forceinline__ bool better(const Minimum& other) const
    {
        return change < other.change || (change == other.change && cell < other.cell);
    }
};

struct SearchScratch {
    Minimum best[RFD_LANES];
};

// The global minimiser in [0, plateau], in length scales; all threads of the block search, each some cells of the grid.
// The result is in thread 0.
__device__ inline double conservative_step(const Objective& objective, SearchScratch& scratch)
{
    const double longest = objective.plateau;
    const double shortest = fmin(fmax(objective.shortest_turn() * RFD_MARGIN, RFD_SHORTEST), longest);
    const double cells = fmax(ceil(log(longest / shortest) * RFD_POINTS_PER_E), 1.0);
    const uint64_t count = static_cast<uint64_t>(cells);
    const Minimum none = {0.0, RFD_F64_INFINITY, count + 2};
    Minimum best = none;
    for (uint64_t i = threadIdx.x + 1; i <= count; i += RFD_LANES) {
        const double left = i == 1 ? shortest : shortest * exp((i - 1) / RFD_POINTS_PER_E);
        const double right = i == count ? longest : shortest * exp(i / RFD_POINTS_PER_E);
        const double left_slope = objective.derivative(left), right_slope = objective.derivative(right);
        if (i == 1 && left_slope >= 0.0) {
            // F rises from the start: then 0 is a local minimum.
            best = {0.0, 0.0, 0};
        }
        if (left_slope < 0.0 && right_slope >= 0.0) {
            const double u = objective.root(left, left_slope, right, right_slope);
            const Minimum found = {u, objective.change(u), i};
            best = found.better(best) ? found : best;
        }
        if (i == count && right_slope < 0.0) {
            const Minimum found = {longest, objective.change(longest), count + 1};
            best = found.better(best) ? found : best;
        }
    }
    scratch.best[threadIdx.x] = best;
    for (uint32_t half = RFD_LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && scratch.best[threadIdx.x + half].better(scratch.best[threadIdx.x])) {
            scratch.best[threadIdx.x] = scratch.best[threadIdx.x + half];
        }
    }
    return scratch.best[0].u;
}
