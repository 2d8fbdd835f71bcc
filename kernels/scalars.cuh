// The scalars of a tensor's update, and how an element changes (docs/summation.md, sections 3 and 4).
#pragma once

#include "partition.cuh"

// The step that all tensors share.
struct Decision {
    double loss;
    double grad_norm;   // Euclidean, gradient scale removed
    double sigma_norm;  // of the geometry that the groups' factors define
    double theta;
    double step_size;
    double learning_rate;   // step size over Σ-norm
    double prescaled_rate;  // step size over the Σ-norm of the gradients as given, times prescale
    double prescale;
    double unscale;  // 1 over the gradient scale
    double decay_share;    // of the learning rate, in weight decay
    double trust;          // of the adaptive method, as is the limit
    uint64_t applied;  // steps before this one
    uint32_t outcome;
    uint32_t limit;  // RFD_LIMIT_*
};

struct Scalars {
    double decay;
    double coefficient;
    double prescale;
    double velocity_decay;
    double unscale;
};

// `scale` is the tensor's own; 1 for RFD as published.
__device__ __forceinline__ Scalars scalars_of(const Decision& decision, const RfdGroup& group, double scale)
{
    const double factor = group.multiplier * (group.length_scale_factor * group.length_scale_factor);
    const double rate = group.velocity_decay > 0.0 ? decision.learning_rate : decision.prescaled_rate;
    const double shrink = decision.learning_rate * decision.decay_share * group.multiplier * group.weight_decay;
    return {fmax(1.0 - shrink, 0.0), rate * factor * scale, decision.prescale, group.velocity_decay, decision.unscale};
}

// Scalars in the format that is computed in.
template <class T>
struct Factors {
    T decay, coefficient, prescale, velocity_decay, unscale;

    Factors() = default;
    __device__ __forceinline__ explicit Factors(const Scalars& s)
        : decay(narrowed<T>(s.decay)),
          coefficient(narrowed<T>(s.coefficient)),
          prescale(narrowed<T>(s.prescale)),
          velocity_decay(narrowed<T>(s.velocity_decay)),
          unscale(narrowed<T>(s.unscale))
    {
    }
};

// How the elements of one tensor change.
struct Change {
    Factors<float> single;
    Factors<double> wide;  // of generic instances
    double coefficient;    // before it is narrowed: rows weigh it
    bool moves;            // by its velocity

    Change() = default;
    __device__ __forceinline__ Change(const Scalars& s, bool moves)
        : single(s), wide(s), coefficient(s.coefficient), moves(moves)
    {
    }
};

// The velocity after a step, as it is stored: in f64 for f64 parameters, else in f32.
template <class T>
__device__ __forceinline__ T next_velocity(T v, T g, T velocity_decay, T unscale, int format)
{
    const T next = v * velocity_decay - g * unscale;
    return format == RFD_DTYPE_F64 ? next : static_cast<T>(static_cast<float>(next));
}

// What of a tensor a pass works on; constants in lean instances.
template <class I>
struct View {
    int param;  // format of what is updated: the parameter, or its master weights
    int grad;
    int half;  // format of a parameter that has master weights
    bool has_master;
    uint64_t weights;  // address of what is updated

    __device__ __forceinline__ explicit View(const RfdTensor& tensor)
    {
        const int own = is_generic<I>() ? param_format(tensor) : I::PARAM;
        has_master = is_generic<I>() ? tensor.master != 0 : I::MASTER;
        param = has_master ? RFD_DTYPE_F32 : own;
        grad = is_generic<I>() ? grad_format(tensor) : I::GRAD;
        half = own;
        weights = has_master ? tensor.master : tensor.param;
    }

    // Format of the velocity.
    __device__ __forceinline__ int state() const
    {
        return param == RFD_DTYPE_F64 ? RFD_DTYPE_F64 : RFD_DTYPE_F32;
    }

    __device__ __forceinline__ bool in_f64() const
    {
        return is_generic<I>() && (param == RFD_DTYPE_F64 || grad == RFD_DTYPE_F64);
    }
};

// Whether a tensor moves by its velocity. With averages all do.
template <class I>
__device__ __forceinline__ bool has_velocity(double velocity_decay)
{
    return I::KIND == Kind::averaged || (I::VELOCITY && velocity_decay > 0.0);
}

__device__ __forceinline__ double grad_scale_of(const RfdStep& step)
{
    return step.grad_scale != 0 ? *reinterpret_cast<const float*>(step.grad_scale) : 1.0;
}
