// Runs random lists of tensors on the shim and compares with a naive program for docs/summation.md, bit for
// bit: as one launch and as separate ones, with the lean instance where there is one and with the generic
// one, on grids of any size. Usage: selftest [cases] [first seed]

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "launch.hpp"

namespace {

using Random = std::mt19937_64;

int between(Random& random, int low, int high)
{
    return std::uniform_int_distribution<int>(low, high)(random);
}

bool chance(Random& random, double p)
{
    return std::uniform_real_distribution<>()(random) < p;
}

// Elements of any format in memory whose alignment is that of an element, or of 16 bytes.
struct Buffer {
    int format = RFD_DTYPE_F32;
    size_t len = 0;
    size_t shift = 0;
    std::vector<unsigned char> bytes;

    Buffer() = default;
    Buffer(int format, size_t len, size_t misaligned) : format(format), len(len)
    {
        bytes.resize((len + 16) * size() + 32);
        shift = (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16 + misaligned * size();
    }
    Buffer(const Buffer& other) : Buffer(other.format, other.len, 0) { copy(other); }
    Buffer& operator=(const Buffer& other)
    {
        if (bytes.size() != other.bytes.size()) {
            Buffer fresh(other.format, other.len, 0);
            std::swap(bytes, fresh.bytes);
            format = fresh.format, len = fresh.len, shift = fresh.shift;
        }
        copy(other);
        return *this;
    }
    Buffer(Buffer&&) = default;

    size_t size() const { return format == RFD_DTYPE_F64 ? 8 : format == RFD_DTYPE_F32 ? 4 : 2; }
    unsigned char* at(size_t i) { return bytes.data() + shift + i * size(); }
    const unsigned char* at(size_t i) const { return bytes.data() + shift + i * size(); }
    uint64_t address() const { return len == 0 ? 16 : reinterpret_cast<uint64_t>(at(0)); }

    double get(size_t i) const
    {
        double d;
        float f;
        uint16_t h;
        switch (format) {
            case RFD_DTYPE_F64: return std::memcpy(&d, at(i), 8), d;
            case RFD_DTYPE_F32: return std::memcpy(&f, at(i), 4), f;
            case RFD_DTYPE_F16: std::memcpy(&h, at(i), 2); return from_f16(h);
            default: std::memcpy(&h, at(i), 2); return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
        }
    }

    // Rounds to nearest, by way of f32 for the half formats.
    void set(size_t i, double x)
    {
        const float f = static_cast<float>(x);
        if (format == RFD_DTYPE_F64) {
            std::memcpy(at(i), &x, 8);
        } else if (format == RFD_DTYPE_F32) {
            std::memcpy(at(i), &f, 4);
        } else {
            const uint16_t h = nearest_half(f);
            std::memcpy(at(i), &h, 2);
        }
    }

    void set_bits(size_t i, uint16_t bits) { std::memcpy(at(i), &bits, 2); }

    bool operator==(const Buffer& other) const
    {
        return len == other.len && (len == 0 || std::memcmp(at(0), other.at(0), len * size()) == 0);
    }

    static double from_f16(uint16_t h)
    {
        const int exponent = h >> 10 & 31, fraction = h & 0x3FF;
        const double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                                 : exponent == 31 ? (fraction ? NAN : INFINITY)
                                                  : std::ldexp(1024 + fraction, exponent - 25);
        return h & 0x8000 ? -magnitude : magnitude;
    }

    double from_bits(uint16_t h) const
    {
        return format == RFD_DTYPE_F16 ? from_f16(h) : std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
    }

    // Of the two neighbours the nearer, the even one of equally near ones: by search, to share nothing with
    // the kernels.
    uint16_t nearest_half(float x) const
    {
        const uint16_t infinity = format == RFD_DTYPE_F16 ? 0x7C00 : 0x7F80;
        const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        const double magnitude = std::fabs(static_cast<double>(x));
        if (std::isnan(x)) {
            return infinity | 1;
        }
        const uint16_t low = below(magnitude);
        if (low == infinity) {
            return sign | infinity;
        }
        // The infinity stands for the number that would come next.
        const double step = low == 0 ? from_bits(1) : from_bits(low) - from_bits(low - 1);
        const double next = low + 1 == infinity ? from_bits(low) + step : from_bits(low + 1);
        const double down = magnitude - from_bits(low), up = next - magnitude;
        return sign | static_cast<uint16_t>(down < up || (down == up && low % 2 == 0) ? low : low + 1);
    }

    // The largest number that is not above.
    uint16_t below(double magnitude) const
    {
        uint16_t low = 0, high = (format == RFD_DTYPE_F16 ? 0x7C00 : 0x7F80) + 1;
        while (high - low > 1) {
            const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
            (from_bits(middle) <= magnitude ? low : high) = middle;
        }
        return low;
    }

private:
    void copy(const Buffer& other)
    {
        if (len > 0) {
            std::memcpy(at(0), other.at(0), len * size());
        }
    }
};

struct Tensor {
    Buffer param, grad, velocity, master;
    bool has_grad = true, has_velocity = false, has_master = false, lock = false, counts = true;
    uint16_t group = 0;
    uint64_t offset = 0;
};

struct Case {
    std::vector<Tensor> tensors;
    std::vector<RfdGroup> groups;
    RfdSettings settings;
    RfdModel model{};
    double loss = 0;
    float grad_scale = 1, found_inf = 0;
    bool stochastic = false;
    uint64_t seed = 0, applied = 0;
};

// ---- the naive program

double tree(std::vector<double> v)
{
    for (size_t half = v.size() / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; ++i) v[i] += v[i + half];
    }
    return v[0];
}

double join(const std::vector<double>& leaves)
{
    std::vector<double> groups;
    for (size_t g = 0; g < 8; ++g) {
        groups.push_back(tree({leaves.begin() + 32 * g, leaves.begin() + 32 * g + 32}));
    }
    return tree(groups);
}

double fold(const std::vector<double>& terms)
{
    std::vector<double> leaves(256);
    for (size_t i = 0; i < terms.size(); ++i) leaves[i % 256] += terms[i];
    return join(leaves);
}

double sum_of(const std::vector<double>& products)
{
    std::vector<double> segments, chunks;
    for (size_t first = 0; first < products.size(); first += 4096) {
        std::vector<double> column(1024), leaves(256);
        for (size_t i = first; i < std::min(first + 4096, products.size()); ++i) column[(i - first) % 1024] += products[i];
        for (size_t l = 0; l < 256; ++l) {
            leaves[l] = (column[4 * l] + column[4 * l + 2]) + (column[4 * l + 1] + column[4 * l + 3]);
        }
        chunks.push_back(join(leaves));
    }
    for (size_t first = 0; first < chunks.size(); first += 256) {
        segments.push_back(fold({chunks.begin() + first, chunks.begin() + std::min(first + 256, chunks.size())}));
    }
    return fold(segments);
}

double squares(const Buffer& b, double scale)
{
    std::vector<double> products;
    for (size_t i = 0; i < b.len; ++i) products.push_back((b.get(i) * scale) * (b.get(i) * scale));
    return sum_of(products);
}

double to(bool wide, double x)
{
    if (wide) return x;
    const float f = static_cast<float>(x);
    return std::isinf(f) ? std::copysign(3.4028234663852886e38f, f) : f;
}

// One operation of the format that is computed in.
double rounded(bool wide, double x)
{
    return wide ? x : static_cast<float>(x);
}

uint32_t random_bits(const Case& c, uint64_t element, uint32_t tensor)
{
    uint32_t x[4] = {static_cast<uint32_t>(element / 8), static_cast<uint32_t>(element / 8 >> 32), tensor,
                     static_cast<uint32_t>(c.applied)};
    uint32_t k[2] = {static_cast<uint32_t>(c.seed), static_cast<uint32_t>(c.seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = 0xD2511F53ull * x[0], b = 0xCD9E8D57ull * x[2];
        const uint32_t y[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k[0], static_cast<uint32_t>(b),
                               static_cast<uint32_t>(a >> 32) ^ x[3] ^ k[1], static_cast<uint32_t>(a)};
        std::memcpy(x, y, sizeof x);
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return x[element % 8 / 2] >> (16 * (element % 2)) & 0xFFFF;
}

// Stochastic rounding to a half format: up with the documented random bits.
uint16_t stochastic_half(const Buffer& b, float x, uint32_t r)
{
    const bool f16 = b.format == RFD_DTYPE_F16;
    if (!std::isfinite(x) || (f16 && std::fabs(x) >= 65536)) return b.nearest_half(x);
    if (!f16) return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + r) >> 16);
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(x));
    const uint16_t low = b.below(magnitude);
    const int exponent = std::max(low >> 10, 1);
    const double fraction = (magnitude - b.from_bits(std::min<uint16_t>(low, 0x7BFF))) / std::ldexp(1, exponent - 25);
    // Below 2⁻¹⁴ all 16 bits count, above the upper 13.
    const bool up = magnitude < 0x1p-14 ? r < fraction * 65536 : (r >> 3) + fraction * 8192 >= 8192;
    return sign | static_cast<uint16_t>(low + up);
}

uint64_t rescales = 0;

RfdStatus naive_step(Case& c)
{
    RfdStatus status{};
    status.applied = c.applied;
    status.loss = c.loss;
    status.outcome = RFD_OUTCOME_FOUND_INF;
    if (c.found_inf != 0) return status;
    std::vector<double> plain, counted, weighted;
    int exponent = 0;
    auto all_sums = [&] {
        plain.clear();
        for (const Tensor& t : c.tensors) {
            const bool f64 = t.grad.format == RFD_DTYPE_F64;
            double sum = t.has_grad ? squares(t.grad, f64 ? std::ldexp(1, -exponent) : 1) : 0;
            if (!f64 && sum != 0) sum = std::ldexp(sum, -2 * exponent);
            plain.push_back(sum);
        }
    };
    all_sums();
    const double all = fold(plain);
    if (all < 0x1p-900 || all == INFINITY) {
        double largest = 0;
        for (const Tensor& t : c.tensors) {
            for (size_t i = 0; t.has_grad && t.grad.format == RFD_DTYPE_F64 && i < t.grad.len; ++i) {
                largest = std::fmax(largest, std::fabs(t.grad.get(i)));
            }
        }
        if (largest > 0 && std::isfinite(largest)) {
            exponent = std::min(1022, std::max(-1022, std::ilogb(largest)));
            ++rescales;
            all_sums();
        }
    }
    bool finite = true;
    for (size_t k = 0; k < c.tensors.size(); ++k) {
        const double f = c.groups[c.tensors[k].group].length_scale_factor;
        finite = finite && std::isfinite(plain[k]);
        counted.push_back(c.tensors[k].counts ? plain[k] : 0);
        weighted.push_back(c.tensors[k].counts ? f * f * plain[k] : 0);
    }
    const double scaled = std::sqrt(fold(weighted)) * std::ldexp(1, exponent);
    status.grad_norm = std::sqrt(fold(counted)) * std::ldexp(1, exponent) / c.grad_scale;
    status.sigma_norm = scaled / c.grad_scale;
    status.outcome = !finite                                ? RFD_OUTCOME_NON_FINITE_GRADIENT
                    : !(c.settings.multiplier >= 0)        ? RFD_OUTCOME_INVALID_OPTION
                    : !std::isfinite(c.loss)               ? RFD_OUTCOME_NON_FINITE_LOSS
                    : !std::isfinite(status.sigma_norm)    ? RFD_OUTCOME_NON_FINITE_GRADIENT
                    : status.sigma_norm == 0               ? RFD_OUTCOME_ZERO_GRADIENT
                                                           : RFD_OUTCOME_APPLIED;
    if (status.outcome != RFD_OUTCOME_APPLIED) return status;
    // The squared exponential, with numbers far from the ends of the range.
    const RfdModel& m = c.model;
    const double ib = c.settings.inv_batch_size;
    const double q = m.variance / (m.variance + m.noise_variance * ib);
    const double p = m.grad_variance / (m.grad_variance + m.noise_grad_variance * ib);
    const double gap = m.mean - std::min(c.loss, m.mean);
    double a = m.length_scale * (p * status.sigma_norm), b = q * gap, u = m.plateau;
    status.theta = INFINITY;
    if (gap > 0) {
        status.theta = (p * status.sigma_norm) / (q * gap);
        if (std::isinf(a) || (a < 1e-150 && b < 1e-150)) {
            const double factor = std::isinf(a) ? 0x1p-512 : 0x1p512;
            a = m.length_scale * (p * (status.sigma_norm * factor)), b = q * (gap * factor);
        }
        const double largest = std::max(a, b);
        a /= largest, b /= largest;
        if (a >= b) {
            const double r = b / a;
            u = 1 / (std::sqrt(r * r / 4 + 1) + r / 2);
        } else {
            const double x = a / b;
            u = x / (std::sqrt(0.25 + x * x) + 0.5);
        }
        u = std::min(u, m.plateau);
    }
    status.step_size = std::min(m.length_scale * u * c.settings.multiplier, c.settings.max_step_size);
    status.learning_rate = std::min(status.step_size / status.sigma_norm, 1.7976931348623157e308);
    for (const RfdGroup& g : c.groups) {
        const double largest = 3.4028234663852886e38, factor = g.multiplier * (g.length_scale_factor * g.length_scale_factor);
        const bool fits = status.grad_norm <= largest * (1 - g.velocity_decay) && status.learning_rate * factor <= largest;
        if (g.velocity_decay > 0 && !fits) {
            status.outcome = RFD_OUTCOME_OUT_OF_RANGE;
            status.theta = status.step_size = status.learning_rate = 0;
            return status;
        }
    }
    const int e = std::ilogb(scaled);
    const double prescale = std::abs(e) <= 32 ? 1 : std::ldexp(1, std::min(126, std::max(-126, -e)));
    for (size_t k = 0; k < c.tensors.size(); ++k) {
        Tensor& t = c.tensors[k];
        if (!t.has_grad) continue;
        const RfdGroup& g = c.groups[t.group];
        const bool moves = g.velocity_decay > 0;
        Buffer& w = t.has_master ? t.master : t.param;
        const bool wide = w.format == RFD_DTYPE_F64 || t.grad.format == RFD_DTYPE_F64;
        const double factor = g.multiplier * (g.length_scale_factor * g.length_scale_factor);
        double coefficient = (moves ? status.learning_rate : status.step_size / (scaled * prescale)) * factor;
        double decay = std::fmax(1 - status.learning_rate * g.multiplier * g.weight_decay, 0);
        auto velocity = [&](size_t i) {
            const double mv = rounded(wide, t.velocity.get(i) * to(wide, g.velocity_decay));
            const double ug = rounded(wide, t.grad.get(i) * to(wide, 1.0 / c.grad_scale));
            return rounded(t.velocity.format == RFD_DTYPE_F64, rounded(wide, mv - ug));
        };
        if (t.lock && w.len > 1) {
            std::vector<double> pp, pd, dd;
            for (size_t i = 0; i < w.len; ++i) {
                const double d = moves ? -velocity(i) : t.grad.get(i);
                pp.push_back(w.get(i) * w.get(i)), pd.push_back(w.get(i) * d), dd.push_back(d * d);
            }
            const double beta = moves ? coefficient : coefficient * prescale, P = sum_of(pp);
            const double moved = decay * decay * P - 2 * (decay * beta) * sum_of(pd) + beta * beta * sum_of(dd);
            const double ratio = std::sqrt(P / moved);
            if (ratio > 0 && std::isfinite(ratio)) decay *= ratio, coefficient *= ratio;
        }
        decay = to(wide, decay), coefficient = to(wide, coefficient);
        for (size_t i = 0; i < w.len; ++i) {
            const double kept = rounded(wide, w.get(i) * decay);
            double next;
            if (moves) {
                const double v = velocity(i);
                t.velocity.set(i, v);
                next = rounded(wide, kept + rounded(wide, v * coefficient));
            } else {
                const double g = rounded(wide, t.grad.get(i) * to(wide, prescale));
                next = rounded(wide, kept - rounded(wide, g * coefficient));
            }
            if (w.size() == 2 && c.stochastic) {
                w.set_bits(i, stochastic_half(w, static_cast<float>(next),
                                              random_bits(c, t.offset + i, static_cast<uint32_t>(k))));
            } else {
                w.set(i, next);
            }
            if (t.has_master) t.param.set(i, w.get(i));
        }
    }
    ++status.applied;
    return status;
}

// ---- the kernels

struct Workspace {
    std::vector<RfdTensor> table;
    RfdTable by_value{};
    RfdStep step{};
    RfdStatus status{}, mirror{};
    std::vector<double> chunk_sums, segment_sums, tensor_sums;
    std::vector<uint32_t> segment_done, tensor_done;
    double largest_grad = 0;

    Workspace(Case& c, bool long_table)
    {
        for (Tensor& t : c.tensors) {
            RfdTensor row{};
            row.param = t.param.address(), row.grad = t.has_grad ? t.grad.address() : 0;
            row.velocity = t.has_velocity ? t.velocity.address() : 0;
            row.master = t.has_master ? t.master.address() : 0;
            row.len = t.param.len, row.offset = t.offset;
            row.first_chunk = step.chunks, row.row = RFD_CHUNK, row.first_segment = step.segments;
            row.group = t.group;
            row.formats = static_cast<uint8_t>(t.param.format | t.grad.format << 4);
            row.flags = static_cast<uint8_t>((t.counts ? RFD_TENSOR_COUNTS : 0) |
                                             (t.lock && t.param.len > 1 ? RFD_TENSOR_LOCK : 0));
            const uint64_t chunks = t.has_grad ? (t.param.len + 4095) / 4096 : 0;
            step.chunks += chunks, step.segments += static_cast<uint32_t>((chunks + 255) / 256);
            table.push_back(row);
        }
        step.method = RFD_METHOD_FITTED;
        // What was there before must not matter.
        const double stale = NAN;
        chunk_sums.assign(step.chunks * 4 + 1, stale), segment_sums.assign(step.segments * 4 + 1, stale);
        tensor_sums.assign(table.size() * 4 + 1, stale);
        segment_done.assign(step.segments + 1, 0), tensor_done.assign(table.size() + 1, 0);
        step.tensor_count = static_cast<uint32_t>(table.size());
        step.group_count = static_cast<uint32_t>(c.groups.size());
        if (long_table || table.size() > RFD_INLINE_TENSORS) {
            step.tensors = reinterpret_cast<uint64_t>(table.data());
        } else {
            std::copy(table.begin(), table.end(), by_value.tensor);
        }
        step.model = c.model;
        step.groups = reinterpret_cast<uint64_t>(c.groups.data());
        step.settings = reinterpret_cast<uint64_t>(&c.settings);
        step.status = reinterpret_cast<uint64_t>(&status), step.mirror = reinterpret_cast<uint64_t>(&mirror);
        step.loss_value = c.loss;
        step.grad_scale = reinterpret_cast<uint64_t>(&c.grad_scale);
        step.found_inf = reinterpret_cast<uint64_t>(&c.found_inf);
        step.chunk_sums = reinterpret_cast<uint64_t>(chunk_sums.data());
        step.segment_sums = reinterpret_cast<uint64_t>(segment_sums.data());
        step.tensor_sums = reinterpret_cast<uint64_t>(tensor_sums.data());
        step.segment_done = reinterpret_cast<uint64_t>(segment_done.data());
        step.tensor_done = reinterpret_cast<uint64_t>(tensor_done.data());
        step.largest_grad = reinterpret_cast<uint64_t>(&largest_grad);
        step.seed = c.seed;
        step.stochastic = c.stochastic;
        status.applied = c.applied;
    }

    void launch(const std::string& kernel, bool cooperative, unsigned grid)
    {
        if (const int code = rfd_shim_launch(kernel.c_str(), cooperative, grid, &step, &by_value)) {
            std::printf("launch of %s: %d\n", kernel.c_str(), code);
            std::exit(1);
        }
    }

    bool at_rest() const
    {
        bool rest = largest_grad == 0;
        for (uint32_t done : segment_done) rest = rest && done == 0;
        for (uint32_t done : tensor_done) rest = rest && done == 0;
        return rest;
    }
};

enum class Form { fused, separate, split };

const char* name_of(Form form)
{
    return form == Form::fused ? "fused" : form == Form::separate ? "separate" : "split";
}

RfdStatus run_kernels(Case& c, const std::string& instance, Form form, unsigned grid, bool long_table, bool& at_rest)
{
    Workspace w(c, long_table);
    RfdSquaredNorm norm{};
    if (form == Form::fused) {
        w.launch("rfd_step_" + instance, true, grid);
    } else {
        w.launch("rfd_norm_" + instance, false, grid);
        if (instance == "generic") {
            w.launch("rfd_rescale_max", false, grid);
            w.launch("rfd_rescale_norm", false, grid);
        }
        if (form == Form::split) {
            w.step.rank_sums = reinterpret_cast<uint64_t>(&norm);
            w.launch("rfd_total", false, 1);
        }
        w.launch("rfd_update_" + instance, false, grid);
        w.launch("rfd_status", false, 1);
    }
    at_rest = w.at_rest() && std::memcmp(&w.status, &w.mirror, sizeof w.status) == 0 &&
              w.status.sequence == w.status.applied + w.status.skipped;
    return w.status;
}

// ---- cases

void fill(Random& random, Buffer& b, double magnitude)
{
    std::normal_distribution<> normal;
    for (size_t i = 0; i < b.len; ++i) {
        b.set(i, normal(random) * magnitude * std::exp2(between(random, -6, 6)));
    }
}

Case make(Random& random, std::string& lean)
{
    const int lens[] = {0, 1, 2, 7, 31, 32, 33, 255, 1023, 1025, 4095, 4096, 4097, 8192, 9000, 12289};
    const struct {
        const char* name;
        int param, grad;
        bool master, velocity;
    } kinds[] = {{"f32", RFD_DTYPE_F32, RFD_DTYPE_F32, false, false},
                 {"f32_momentum", RFD_DTYPE_F32, RFD_DTYPE_F32, false, true},
                 {"bf16_master", RFD_DTYPE_BF16, RFD_DTYPE_BF16, true, false},
                 {"bf16_master_momentum", RFD_DTYPE_BF16, RFD_DTYPE_BF16, true, true},
                 {"bf16", RFD_DTYPE_BF16, RFD_DTYPE_BF16, false, false},
                 {"f16_master", RFD_DTYPE_F16, RFD_DTYPE_F16, true, false},
                 {"generic", 0, 0, false, false}};
    const auto& kind = kinds[between(random, 0, 6)];
    lean = kind.name;
    const bool generic = lean == "generic";
    const bool any_velocity = generic ? chance(random, 0.5) : kind.velocity;
    Case c;
    for (int i = between(random, 1, 3); i > 0; --i) {
        c.groups.push_back({std::exp2(between(random, -4, 4) * 0.3), chance(random, 0.5) ? 1.0 : 0.7,
                            any_velocity && chance(random, 0.8) ? 0.9 : 0.0, chance(random, 0.5) ? 0.0 : 0.1});
    }
    // Gradients that need prescaling, and f64 ones that need rescaling.
    const bool extreme = chance(random, 0.3);
    const int extremes[] = {-600, -530, -100, 100, 520, 700};
    const double size = extreme ? std::exp2(extremes[between(random, 0, 5)]) : 1;
    const int count = chance(random, 0.1) ? between(random, 400, 500) : between(random, 0, 12);
    for (int k = 0; k < count; ++k) {
        Tensor t;
        size_t len = static_cast<size_t>(lens[between(random, 0, count > 12 ? 6 : 15)]);
        if (count <= 12 && chance(random, 0.002)) len = 4096 * 260 + 5;
        const int pf = generic ? between(random, 0, 3) : kind.param, gf = generic ? between(random, 0, 3) : kind.grad;
        const bool half = pf >= RFD_DTYPE_F16;
        auto shift = [&] { return chance(random, 0.3) ? static_cast<size_t>(between(random, 1, 3)) : 0; };
        t.param = Buffer(pf, len, shift());
        t.grad = Buffer(gf, len, shift());
        t.has_master = half && (generic ? chance(random, 0.5) : kind.master);
        t.master = Buffer(RFD_DTYPE_F32, len, shift());
        t.has_velocity = any_velocity;
        t.velocity = Buffer(pf == RFD_DTYPE_F64 ? RFD_DTYPE_F64 : RFD_DTYPE_F32, len, shift());
        fill(random, t.param, 1);
        for (size_t i = 0; i < len; ++i) t.master.set(i, t.param.get(i) * 1.0001);
        if (any_velocity) fill(random, t.velocity, 0.1);
        // Down to subnormal f32, whose learning rate exceeds f32.
        const double least = gf == RFD_DTYPE_F64 ? -1000 : gf == RFD_DTYPE_F16 ? -10 : -136;
        const double most = gf == RFD_DTYPE_F64 ? 1000 : gf == RFD_DTYPE_F16 ? 6 : 105;
        fill(random, t.grad, std::exp2(std::fmin(most, std::fmax(least, std::log2(size)))));
        t.group = static_cast<uint16_t>(between(random, 0, static_cast<int>(c.groups.size()) - 1));
        t.has_grad = chance(random, 0.93);
        t.counts = chance(random, 0.93);
        t.lock = generic && chance(random, 0.3);
        t.offset = static_cast<uint64_t>(chance(random, 0.5) ? 0 : between(random, 0, 100)) << between(random, 0, 40);
        c.tensors.push_back(std::move(t));
    }
    c.settings = {chance(random, 0.5) ? 1.0 : 0.5, chance(random, 0.5) ? 0.0 : 1.0 / 64,
                  chance(random, 0.8) ? INFINITY : 0.01};
    c.model.mean = 2.3, c.model.variance = 0.5, c.model.noise_variance = 0.9, c.model.grad_variance = 4;
    c.model.noise_grad_variance = 200, c.model.length_scale = 11.5, c.model.slope = 1, c.model.plateau = 1;
    c.model.beta = 1, c.model.family = RFD_FAMILY_SQUARED_EXPONENTIAL, c.model.mode = RFD_MODE_RFD;
    c.loss = chance(random, 0.1) ? 2.5 : 1.9;
    c.grad_scale = chance(random, 0.5) ? 1 : 1024;
    c.stochastic = chance(random, 0.5);
    c.seed = random();
    c.applied = random() >> between(random, 0, 63);
    if (chance(random, 0.1)) {
        const float nan = NAN;
        switch (between(random, 0, 3)) {
            case 0: c.found_inf = chance(random, 0.5) ? 2 : nan; break;
            case 1: c.loss = NAN; break;
            case 2: c.settings.multiplier = NAN; break;
            default:
                for (Tensor& t : c.tensors) {
                    if (t.grad.len > 0 && chance(random, 0.3)) {
                        const size_t places[] = {0, t.grad.len / 2, t.grad.len - 1};
                        t.grad.set(places[between(random, 0, 2)], chance(random, 0.5) ? NAN : INFINITY);
                    }
                }
        }
    }
    return c;
}

bool same(double a, double b)
{
    return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) || (std::isnan(a) && std::isnan(b));
}

bool compare(const Case& expected, const RfdStatus& e, const Case& found, const RfdStatus& f, const std::string& what)
{
    bool ok = e.outcome == f.outcome && e.applied == f.applied && same(e.grad_norm, f.grad_norm) &&
              same(e.sigma_norm, f.sigma_norm) && same(e.theta, f.theta) && same(e.step_size, f.step_size) &&
              same(e.learning_rate, f.learning_rate);
    if (!ok) {
        std::printf("%s: status: outcome %d %d, norm %a %a, sigma %a %a, theta %a %a, step %a %a\n", what.c_str(),
                    (int)e.outcome, (int)f.outcome, e.grad_norm, f.grad_norm, e.sigma_norm, f.sigma_norm, e.theta, f.theta,
                    e.step_size, f.step_size);
    }
    for (size_t k = 0; k < expected.tensors.size(); ++k) {
        const Tensor &x = expected.tensors[k], &y = found.tensors[k];
        const struct {
            const char* name;
            const Buffer &x, &y;
        } buffers[] = {{"param", x.param, y.param}, {"velocity", x.velocity, y.velocity}, {"master", x.master, y.master}};
        for (const auto& b : buffers) {
            if (b.x == b.y) continue;
            ok = false;
            for (size_t i = 0; i < b.x.len; ++i) {
                if (!same(b.x.get(i), b.y.get(i))) {
                    std::printf("%s: tensor %zu (formats %d %d, lock %d), %s[%zu of %zu]: expected %a, found %a\n",
                                what.c_str(), k, x.param.format, x.grad.format, x.lock, b.name, i, b.x.len, b.x.get(i),
                                b.y.get(i));
                    break;
                }
            }
        }
    }
    return ok;
}

}  // namespace

int main(int argc, char** argv)
{
    const uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const auto start = std::chrono::steady_clock::now();
    uint64_t failures = 0, runs = 0, outcomes[9] = {};
    for (uint64_t seed = first; seed < first + cases; ++seed) {
        Random random(seed);
        std::string lean;
        const Case original = make(random, lean);
        Case expected = original;
        const RfdStatus status = naive_step(expected);
        ++outcomes[status.outcome];
        for (const std::string& instance : {lean, std::string("generic")}) {
            for (const Form form : {Form::fused, Form::separate, Form::split}) {
                // A shard knows no norms of whole tensors; and squares that are handed out can't be formed
                // again.
                bool splits = status.outcome != RFD_OUTCOME_NON_FINITE_GRADIENT && status.outcome != RFD_OUTCOME_ZERO_GRADIENT &&
                              std::fabs(std::log2(status.sigma_norm)) < 400;
                for (const Tensor& t : original.tensors) splits = splits && !t.lock;
                if (form == Form::split && !splits) continue;
                Case found = original;
                // Copies of buffers are aligned; the original addresses are what was to be tested.
                if (form == Form::fused) {
                    Random again(seed);
                    std::string unused;
                    found = make(again, unused);
                }
                rfd_shim_seed(random());
                const unsigned grid = static_cast<unsigned>(between(random, 1, form == Form::fused ? 5 : 9));
                bool at_rest = false;
                const RfdStatus result = run_kernels(found, instance, form, grid, chance(random, 0.3), at_rest);
                const std::string what = "seed " + std::to_string(seed) + ", " + instance + ", " + name_of(form) +
                                         ", grid " + std::to_string(grid);
                if (!at_rest) std::printf("%s: counters are not 0 or the mirror differs\n", what.c_str());
                failures += !(compare(expected, status, found, result, what) && at_rest);
                ++runs;
            }
        }
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::printf("%llu runs of %llu lists in %.1f s: %llu failures (%llu rescales; applied %llu, skipped %llu %llu %llu %llu "
                "%llu %llu)\n",
                (unsigned long long)runs, (unsigned long long)cases, time.count(), (unsigned long long)failures,
                (unsigned long long)rescales, (unsigned long long)outcomes[1], (unsigned long long)outcomes[2], (unsigned long long)outcomes[3],
                (unsigned long long)outcomes[4], (unsigned long long)outcomes[5], (unsigned long long)outcomes[6],
                (unsigned long long)outcomes[7]);
    return failures != 0;
}
