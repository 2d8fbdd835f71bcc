// Conservative steps: the global minimum of the upper confidence bound, searched by all threads of a block
// together. Follows src/covariance/search.rs; its exponentials make the result agree to about 1e-9, not bit
// for bit.
#pragma once

#include "step_size.cuh"

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

    // Not inlined: the profiles of four families, in each of the five places that need one, would be most of
    // the kernel.
    __device__ __noinline__ Profile profile(double u) const
    {
        return profile_of_family(family, u, beta);
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

    // The root of F' between two points where its signs differ, by Chandrupatla's method: inverse quadratic
    // interpolation where it is safe, bisection otherwise.
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
    Minimum best[RFD_THREADS];
};

// The global minimiser in [0, plateau], in length scales; all threads of the block search, each some cells of
// the grid. The result is scratch.best[0], for thread 0 alone.
__device__ inline void conservative_step(const Objective& objective, SearchScratch& scratch)
{
    const double longest = objective.plateau;
    const double shortest = fmin(fmax(objective.shortest_turn() * RFD_MARGIN, RFD_SHORTEST), longest);
    const double cells = fmax(ceil(log(longest / shortest) * RFD_POINTS_PER_E), 1.0);
    const uint64_t count = static_cast<uint64_t>(cells);
    const Minimum none = {0.0, RFD_F64_INFINITY, count + 2};
    Minimum best = none;
    for (uint64_t i = threadIdx.x + 1; i <= count; i += RFD_THREADS) {
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
    for (uint32_t half = RFD_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && scratch.best[threadIdx.x + half].better(scratch.best[threadIdx.x])) {
            scratch.best[threadIdx.x] = scratch.best[threadIdx.x + half];
        }
    }
}
