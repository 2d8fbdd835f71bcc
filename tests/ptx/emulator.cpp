// The emulator. Threads run in warps of 32 lanes; of the lanes of a warp those with the lowest program
// counter go first, within the innermost function. A register is an array of 32 lanes. Warps of all resident
// blocks take turns in random order.
//
// Strict: an opcode, operand or access that isn't known, or that PTX leaves undefined, ends the program.
// Shared memory and parameters have addresses of their own, which only cvta turns into generic ones.

#include "emulator.hpp"

#include <cfenv>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using f32 = float;
using f64 = double;
using std::string;

constexpr u32 LANES = 32;
constexpr u32 NO_PC = ~0u;
// Where addresses of shared memory and of parameters begin, so that neither is 0 nor looks like the other.
constexpr u64 SHARED_BASE = 0x400, PARAM_BASE = 0x20000;
constexpr size_t WORKSPACE = 256;

[[noreturn]] void fail(const char* format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "ptx emulator: ");
    std::vfprintf(stderr, format, arguments);
    std::fprintf(stderr, "\n");
    va_end(arguments);
    std::abort();
}

struct Warp;
struct Ins;
struct Function;
using Handler = void (*)(Warp&, const Ins&);

// Width 1 is a predicate; else bytes of a register.
struct Op {
    u8* konst = nullptr;  // 32 lanes of a constant, or null
    u32 off = 0;          // of a register in the frame; index of a predicate
    u32 reg = 0;          // index for definedness
    u8 width = 0;
};

enum class Space : u8 { generic, global, shared, local, param_kernel, param_own };

struct Ins {
    Handler fn = nullptr;
    Op d, d2, a, b, c, e;
    Op v[4];
    u8 count = 1;      // elements of a vector
    u8 size = 0;       // bytes of an element in memory
    Space space = Space::generic;
    bool strong = false;    // volatile, acquire, release
    bool acquire = false, release = false;
    bool past_l1 = false;   // a load that no first-level cache may serve
    i64 offset = 0;
    int guard = -1;
    bool guard_not = false;
    u32 target = 0;
    Function* callee = nullptr;
    std::vector<u32> arguments;  // places in the caller's area
    u32 result = NO_PC;          // place of the returned value
    u32 line = 0;
    string text;
    mutable u64 executed = 0, undefined = 0, uninitialised = 0;
    mutable u32 hint = 0;
};

struct Parameter {
    string name;
    u32 size, offset;
};

struct Function {
    string name;
    bool entry = false, defined = false;
    std::vector<Parameter> parameters;
    Parameter result{"", 0, 0};
    u32 parameter_bytes = 0;
    std::vector<Ins> code;
    size_t frame = 0;   // bytes of registers
    u32 preds = 0, regs = 0, area = 0;
    // Of launches.
    u64 launches = 0, cooperative = 0;
    std::map<unsigned, u64> grids;
};

class Module {
public:
    std::map<string, std::unique_ptr<Function>> functions;
    std::unordered_map<string, u64> shared;  // addresses
    std::unordered_map<string, u64> local;   // the same, from where a thread's begin
    size_t local_size = 0;
    u64 shared_size = SHARED_BASE;
    std::vector<std::unique_ptr<u64[]>> pool;

    u8* constant(u64 bits, u32 width)
    {
        pool.push_back(std::make_unique<u64[]>(LANES));
        u8* at = reinterpret_cast<u8*>(pool.back().get());
        for (u32 l = 0; l < LANES; ++l) {
            std::memcpy(at + l * width, &bits, width);
        }
        return at;
    }
};

struct Group {
    u32 pc, mask;
    bool blocked;
    bool soft = false;  // waits before a call for as long as others can run
};

struct Frame {
    Function* function;
    size_t regs;  // offset in the warp's arena
    u32 mask0;    // lanes that entered
    u32 pc, mask, next_pc;
    bool released;              // the group that runs has waited before its call
    std::vector<Group> groups;  // others than the one that runs
    std::vector<u32> preds, def;
    std::vector<u8> area;  // parameters and results, a stretch for each lane
    const Ins* call;       // in the caller
};

struct Block;

enum class State { run, barrier, done };

struct Warp {
    Block* block;
    u32 index, live;
    State state;
    std::vector<u8> arena;
    size_t used;
    std::vector<std::unique_ptr<Frame>> frames;
    size_t depth;
    Frame* top;
    u8* regs;
    u32* preds;
    u32* def;
    u32 mask;            // lanes of the instruction that runs
    const Ins* waiting;  // at the block's barrier
    u32 global_index;    // among all warps of the grid
    u64 sync;            // times that its lanes have waited for one another
};

// For the search for races: of each warp of the grid, how much is known to have happened.
using Clock = std::vector<u32>;

struct Run {
    Module* module;
    const Launch* launch;
    Function* function;
    std::vector<u8> parameters;
    std::vector<Allocation> memory;
    u64 workspace;  // of the grid barrier, 0 if the launch is not cooperative
    u64 instructions = 0;
};

struct Block {
    Run* run;
    u32 index;
    std::vector<u8> shared, shared_init;
    std::vector<u8> local;  // of one thread after the other
    std::vector<Warp> warps;
    u32 arrived, running;
};

[[noreturn]] void fault(const Warp& w, const Ins& i, const char* format, ...)
{
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    fail("%s (kernel %s, grid %u, function %s, block %u, warp %u, lanes %08x; line %u: %s)", what,
         w.block->run->function->name.c_str(), w.block->run->launch->grid, w.top->function->name.c_str(), w.block->index,
         w.index, w.mask, i.line, i.text.c_str());
}

#include "races.hpp"

// ---- operands

template <class T>
inline T* at(Warp& w, const Op& o)
{
    return reinterpret_cast<T*>(o.konst != nullptr ? o.konst : w.regs + o.off);
}

inline void need(Warp& w, const Ins& i, const Op& o)
{
    if (o.konst == nullptr && (w.mask & ~w.def[o.reg]) != 0) [[unlikely]] {
        ++i.undefined;
    }
}

inline void mark(Warp& w, const Op& o)
{
    w.def[o.reg] |= w.mask;
}

#define EACH(...)                                                \
    do {                                                         \
        const u32 m_ = w.mask;                                   \
        if (m_ == ~0u) {                                         \
            _Pragma("GCC ivdep") for (u32 l = 0; l < LANES; ++l) \
            {                                                    \
                __VA_ARGS__;                                     \
            }                                                    \
        } else {                                                 \
            for (u32 r_ = m_; r_ != 0; r_ &= r_ - 1) {           \
                const u32 l = std::countr_zero(r_);              \
                __VA_ARGS__;                                     \
            }                                                    \
        }                                                        \
    } while (0)

template <class D, class A, auto F>
void unary(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    const A* a = at<A>(w, i.a);
    D* d = at<D>(w, i.d);
    EACH(d[l] = F(a[l]));
    mark(w, i.d);
}

template <class D, class A, class B, auto F>
void binary(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    const A* a = at<A>(w, i.a);
    const B* b = at<B>(w, i.b);
    D* d = at<D>(w, i.d);
    EACH(d[l] = F(a[l], b[l]));
    mark(w, i.d);
}

template <class D, class A, class B, class C, auto F>
void ternary(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    need(w, i, i.c);
    const A* a = at<A>(w, i.a);
    const B* b = at<B>(w, i.b);
    const C* c = at<C>(w, i.c);
    D* d = at<D>(w, i.d);
    EACH(d[l] = F(a[l], b[l], c[l]));
    mark(w, i.d);
}

inline void set_pred(Warp& w, const Op& o, u32 bits)
{
    w.preds[o.off] = (w.preds[o.off] & ~w.mask) | (bits & w.mask);
    mark(w, o);
}

template <class T, auto F>
void compare(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    const T* a = at<T>(w, i.a);
    const T* b = at<T>(w, i.b);
    u32 bits = 0;
    for (u32 l = 0; l < LANES; ++l) {
        bits |= static_cast<u32>(F(a[l], b[l])) << l;
    }
    set_pred(w, i.d, bits);
}

template <class T>
void select(Warp& w, const Ins& i)
{
    need(w, i, i.c);
    const u32 p = w.preds[i.c.off];
    if ((i.a.konst == nullptr && (w.mask & p & ~w.def[i.a.reg]) != 0) ||
        (i.b.konst == nullptr && (w.mask & ~p & ~w.def[i.b.reg]) != 0)) {
        ++i.undefined;
    }
    const T* a = at<T>(w, i.a);
    const T* b = at<T>(w, i.b);
    T* d = at<T>(w, i.d);
    EACH(d[l] = (p >> l & 1) != 0 ? a[l] : b[l]);
    mark(w, i.d);
}

template <class T>
void move(Warp& w, const Ins& i)
{
    const T* a = at<T>(w, i.a);
    T* d = at<T>(w, i.d);
    EACH(d[l] = a[l]);
    // A copy of what isn't defined isn't either.
    const u32 defined = i.a.konst != nullptr ? ~0u : w.def[i.a.reg];
    w.def[i.d.reg] = (w.def[i.d.reg] & ~w.mask) | (defined & w.mask);
}

template <auto F>
void logic(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    set_pred(w, i.d, F(w.preds[i.a.off], w.preds[i.b.off]));
}

void not_pred(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    set_pred(w, i.d, ~w.preds[i.a.off]);
}

// Predicates as constants: mov.pred %p, 0 or -1.
void move_pred(Warp& w, const Ins& i)
{
    if (i.a.konst != nullptr) {
        set_pred(w, i.d, *i.a.konst != 0 ? ~0u : 0);
        return;
    }
    const u32 defined = w.def[i.a.reg];
    set_pred(w, i.d, w.preds[i.a.off]);
    w.def[i.d.reg] = (w.def[i.d.reg] & ~w.mask) | (defined & w.mask);
}

// d = {v...}
void pack(Warp& w, const Ins& i)
{
    u8* d = at<u8>(w, i.d);
    const u32 part = i.d.width / i.count;
    u32 defined = ~0u;
    for (u32 k = 0; k < i.count; ++k) {
        const u8* s = at<u8>(w, i.v[k]);
        defined &= i.v[k].konst != nullptr ? ~0u : w.def[i.v[k].reg];
        EACH(std::memcpy(d + l * i.d.width + k * part, s + l * part, part));
    }
    w.def[i.d.reg] = (w.def[i.d.reg] & ~w.mask) | (defined & w.mask);
}

// {v...} = a
void unpack(Warp& w, const Ins& i)
{
    const u8* a = at<u8>(w, i.a);
    const u32 part = i.a.width / i.count, defined = i.a.konst != nullptr ? ~0u : w.def[i.a.reg];
    for (u32 k = 0; k < i.count; ++k) {
        u8* d = at<u8>(w, i.v[k]);
        EACH(std::memcpy(d + l * part, a + l * i.a.width + k * part, part));
        w.def[i.v[k].reg] = (w.def[i.v[k].reg] & ~w.mask) | (defined & w.mask);
    }
}

// ---- arithmetic

// Results of single precision that are NaN have one bit pattern.
inline f32 canonical(f32 x)
{
    return x != x ? std::bit_cast<f32>(0x7FFFFFFFu) : x;
}

template <class T>
inline T smaller(T a, T b)
{
    if (a != a) return b != b ? std::bit_cast<T>(static_cast<std::conditional_t<sizeof(T) == 8, u64, u32>>(
                                    sizeof(T) == 8 ? 0x7FFFFFFFFFFFFFFFull : 0x7FFFFFFFu))
                              : b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

template <class T>
inline T larger(T a, T b)
{
    if (a != a) return b != b ? std::bit_cast<T>(static_cast<std::conditional_t<sizeof(T) == 8, u64, u32>>(
                                    sizeof(T) == 8 ? 0x7FFFFFFFFFFFFFFFull : 0x7FFFFFFFu))
                              : b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

inline f32 widen_f16(u16 bits)
{
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    if (exponent == 31) {
        return fraction != 0 ? std::bit_cast<f32>(0x7FFFFFFFu) : std::bit_cast<f32>(sign | 0x7F800000u);
    }
    const f32 magnitude = exponent == 0 ? std::ldexp(static_cast<f32>(fraction), -24)
                                        : std::ldexp(static_cast<f32>(1024 + fraction), static_cast<int>(exponent) - 25);
    return sign != 0 ? -magnitude : magnitude;
}

// To nearest even, by the ties of an exact quotient: written to share nothing with the kernels' shim.
inline u16 narrow_f16(f32 x)
{
    if (x != x) return 0x7FFF;
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const f64 magnitude = std::fabs(static_cast<f64>(x));
    if (magnitude == 0.0) return sign;
    if (magnitude >= 65520.0) return sign | 0x7C00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent, m in [1/2, 1)
    const int unit = std::max(exponent - 11, -24);
    const f64 units = std::nearbyint(std::ldexp(magnitude, -unit));  // ties to even
    // units counts of 2^unit; up to 2048, which carries into the exponent as it should.
    const u32 whole = static_cast<u32>(units);
    if (unit == -24 && whole < 1024) return static_cast<u16>(sign | whole);
    return static_cast<u16>(sign | ((static_cast<u32>(unit + 24) << 10) + whole));
}

// Floats to integers: NaN is 0, what is out of range is clamped.
template <class I, class F>
inline I to_integer(F x)
{
    if (x != x) return 0;
    const F t = std::trunc(x);
    if (t < static_cast<F>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    if (t >= std::ldexp(static_cast<F>(1), std::numeric_limits<I>::digits)) return std::numeric_limits<I>::max();
    return static_cast<I>(t);
}

// "A gross approximation": of the high half of the operand, with zeros in the low half of the result. What
// its last bits are isn't specified: PTXEMU_RCP moves them.
inline f64 rough_reciprocal(f64 x)
{
    static const int variant = [] {
        const char* value = std::getenv("PTXEMU_RCP");
        return value != nullptr ? std::atoi(value) : 0;
    }();
    const u64 sign = std::bit_cast<u64>(x) & 0x8000000000000000ull;
    if (x != x) return std::bit_cast<f64>(0x7FFFFFFF00000000ull);
    if (std::fabs(x) < 0x1p-1022) return std::bit_cast<f64>(sign | 0x7FF0000000000000ull);
    if (std::isinf(x)) return std::bit_cast<f64>(sign);
    const f64 high = std::bit_cast<f64>(std::bit_cast<u64>(x) & 0xFFFFFFFF00000000ull);
    const f64 inverse = 1.0 / high;
    if (std::fabs(inverse) < 0x1p-1022) return std::bit_cast<f64>(sign);
    u64 bits = std::bit_cast<u64>(inverse);
    bits = (bits + (variant == 1 ? 0 : 0x80000000ull)) & 0xFFFFFFFF00000000ull;
    bits += static_cast<u64>(static_cast<i64>(variant == 2 ? 1 : variant == 3 ? 8 : variant == 4 ? -8 : 0)) << 32;
    return std::bit_cast<f64>(bits);
}

inline u32 permute(u32 a, u32 b, u32 selector)
{
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 result = 0;
    for (u32 k = 0; k < 4; ++k) {
        const u32 which = selector >> (4 * k) & 15;
        u32 byte = static_cast<u32>(both >> (8 * (which & 7))) & 0xFF;
        if ((which & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
        result |= byte << (8 * k);
    }
    return result;
}

template <class T, bool REST>
void divide(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    const T* a = at<T>(w, i.a);
    const T* b = at<T>(w, i.b);
    T* d = at<T>(w, i.d);
    for (u32 r = w.mask; r != 0; r &= r - 1) {
        const u32 l = std::countr_zero(r);
        if (b[l] == 0) fault(w, i, "a division by zero, whose result is unspecified");
        d[l] = REST ? a[l] % b[l] : a[l] / b[l];
    }
    mark(w, i.d);
}

template <class T>
void insert_bits(Warp& w, const Ins& i)
{
    for (const Op* o : {&i.a, &i.b, &i.c, &i.e}) need(w, i, *o);
    const T *a = at<T>(w, i.a), *b = at<T>(w, i.b);
    const u32 *c = at<u32>(w, i.c), *e = at<u32>(w, i.e);
    T* d = at<T>(w, i.d);
    EACH(const u32 pos = c[l] & 0xFF; const u32 len = e[l] & 0xFF; u64 f = b[l];
         for (u32 k = 0; k < len && pos + k < 8 * sizeof(T); ++k) {
             const u64 bit = k < 8 * sizeof(T) ? a[l] >> k & 1 : 0;
             f = (f & ~(1ull << (pos + k))) | bit << (pos + k);
         } d[l] = static_cast<T>(f));
    mark(w, i.d);
}

// ---- convergence

// With PTXEMU_LANES=1 lanes that have parted go on in random turns and need not meet again before a
// collective.
const bool independent = std::getenv("PTXEMU_LANES") != nullptr && std::atoi(std::getenv("PTXEMU_LANES")) != 0;
std::minstd_rand lane_order;

void choose(Warp& w, Frame& f)
{
    // The group with the lowest pc that may run, after groups at the same pc have joined.
    std::sort(f.groups.begin(), f.groups.end(), [](const Group& a, const Group& b) { return a.pc < b.pc; });
    size_t kept = 0;
    for (size_t k = 0; k < f.groups.size(); ++k) {
        if (kept > 0 && f.groups[kept - 1].pc == f.groups[k].pc) {
            f.groups[kept - 1].mask |= f.groups[k].mask;
            // With more lanes what it waits for may be complete.
            f.groups[kept - 1].blocked = f.groups[kept - 1].blocked && f.groups[k].blocked;
            f.groups[kept - 1].soft = f.groups[kept - 1].soft && f.groups[k].soft;
        } else {
            f.groups[kept++] = f.groups[k];
        }
    }
    f.groups.resize(kept);
    size_t chosen = kept;
    f.released = false;
    const size_t shift = independent ? lane_order() % kept : 0;
    for (size_t k = 0; k < kept && chosen == kept; ++k) {
        const Group& g = f.groups[(k + shift) % kept];
        if (!g.blocked && !g.soft) chosen = (k + shift) % kept;
    }
    for (size_t k = 0; k < kept && chosen == kept; ++k) {
        if (f.groups[k].soft) {
            chosen = k;
            f.released = true;
        }
    }
    if (chosen == kept) {
        const Ins& i = f.function->code[f.groups[0].pc];
        fault(w, i, "lanes wait for others of their warp that can't come");
    }
    f.pc = f.groups[chosen].pc;
    f.mask = f.groups[chosen].mask;
    f.groups.erase(f.groups.begin() + static_cast<long>(chosen));
    f.next_pc = NO_PC;
    if (independent) return;
    for (const Group& g : f.groups) {
        if (!g.blocked || g.pc > f.pc) f.next_pc = std::min(f.next_pc, g.pc);
    }
}

void regroup(Warp& w, Frame& f)
{
    f.groups.push_back({f.pc, f.mask, false});
    choose(w, f);
}

// Whether all of `members` that still run are here; else these lanes wait for the others.
bool converged(Warp& w, const Ins& i, u32 members)
{
    Frame& f = *w.top;
    if (i.guard >= 0) fault(w, i, "a predicated collective");
    if ((w.mask & ~members) != 0) fault(w, i, "lanes that are no members of the collective they are in");
    if (w.mask == (members & w.live)) return true;
    f.groups.push_back({f.pc - 1, f.mask, true});
    // Groups that were blocked here before have the lanes of this one added by choose().
    for (Group& g : f.groups) {
        if (g.pc == f.pc - 1) {
            u32 all = 0;
            for (const Group& h : f.groups) all |= h.pc == g.pc ? h.mask : 0;
            if (all == (members & w.live)) g.blocked = false;
        }
    }
    choose(w, f);
    return false;
}

u32 members_of(Warp& w, const Ins& i, const Op& o)
{
    need(w, i, o);
    const u32* m = at<u32>(w, o);
    const u32 first = m[std::countr_zero(w.mask)];
    EACH(if (m[l] != first) fault(w, i, "different member masks"));
    return first;
}

template <bool DOWN>
void shuffle(Warp& w, const Ins& i)
{
    if (!converged(w, i, members_of(w, i, i.e))) return;
    for (const Op* o : {&i.a, &i.b, &i.c}) need(w, i, *o);
    const u32 *a = at<u32>(w, i.a), *b = at<u32>(w, i.b), *c = at<u32>(w, i.c);
    u32* d = at<u32>(w, i.d);
    u32 result[LANES], bits = 0;
    for (u32 r = w.mask; r != 0; r &= r - 1) {
        const u32 lane = std::countr_zero(r), bval = b[lane] & 31, cval = c[lane] & 31, segment = c[lane] >> 8 & 31;
        const u32 low = lane & segment, high = low | (cval & ~segment);
        u32 j = DOWN ? lane + bval : low | (bval & ~segment);
        const bool in = j <= high;
        if (!in) j = lane;
        bits |= static_cast<u32>(in) << lane;
        if ((w.mask >> j & 1) == 0) fault(w, i, "a shuffle from a lane that isn't there");
        result[lane] = a[j];
    }
    EACH(d[l] = result[l]);
    mark(w, i.d);
    if (i.d2.width != 0) set_pred(w, i.d2, bits);
}

void ballot(Warp& w, const Ins& i)
{
    if (!converged(w, i, members_of(w, i, i.b))) return;
    need(w, i, i.a);
    const u32 bits = w.preds[i.a.off] & w.mask;
    u32* d = at<u32>(w, i.d);
    EACH(d[l] = bits);
    mark(w, i.d);
}

void warp_barrier(Warp& w, const Ins& i)
{
    if (!converged(w, i, members_of(w, i, i.a))) return;
    races.warp_barrier(w);
}

// bar.sync 0, barrier.sync 0, bar.red.and.pred
template <bool REDUCES>
void block_barrier(Warp& w, const Ins& i)
{
    if (!converged(w, i, ~0u)) return;
    if (w.live != ~0u) fault(w, i, "a barrier that some threads have left the kernel without");
    if (REDUCES) need(w, i, i.a);
    w.state = State::barrier;
    w.waiting = &i;
    ++w.block->arrived;
}

template <bool REDUCES>
inline bool is_barrier(Handler fn)
{
    return fn == static_cast<Handler>(block_barrier<REDUCES>);
}

void release(Block& b)
{
    bool all = true;
    for (Warp& w : b.warps) {
        if (is_barrier<true>(w.waiting->fn)) all = all && (w.preds[w.waiting->a.off] == ~0u);
    }
    bool reduces = false, plain = false;
    for (Warp& w : b.warps) {
        if (is_barrier<true>(w.waiting->fn)) {
            w.mask = ~0u;
            set_pred(w, w.waiting->d, all ? ~0u : 0);
            reduces = true;
        } else {
            plain = true;
        }
        w.state = State::run;
    }
    if (reduces && plain) fault(b.warps[0], *b.warps[0].waiting, "barriers with and without reduction at once");
    b.arrived = 0;
    races.block_barrier(b);
}

// ---- control flow

void branch(Warp& w, const Ins& i)
{
    Frame& f = *w.top;
    const u32 taken = w.mask;
    if (taken == f.mask) {
        const bool back = i.target < f.pc;
        f.pc = i.target;
        if (back && !f.groups.empty()) regroup(w, f);
        return;
    }
    // Also where no lane takes it.
    if (taken == 0) return;
    f.groups.push_back({i.target, taken, false});
    f.mask &= ~taken;
    regroup(w, f);
}

void enter(Warp& w, Function& function, u32 mask, const Ins* call)
{
    if (w.frames.size() == w.depth) w.frames.push_back(std::make_unique<Frame>());
    Frame& f = *w.frames[w.depth++];
    f.function = &function;
    f.regs = w.used;
    w.used += function.frame;
    if (w.used > w.arena.size()) fail("the arena of a warp is too small");
    std::memset(w.arena.data() + f.regs, 0xFF, function.frame);
    f.mask0 = f.mask = mask;
    f.pc = 0;
    f.next_pc = NO_PC;
    f.released = false;
    f.groups.clear();
    f.preds.assign(function.preds, 0xAAAAAAAAu);
    f.def.assign(function.regs, 0);
    f.area.assign(static_cast<size_t>(function.area) * LANES, 0xFF);
    f.call = call;
    w.top = &f;
    w.regs = w.arena.data() + f.regs;
    w.preds = f.preds.data();
    w.def = f.def.data();
}

void call(Warp& w, const Ins& i)
{
    if (i.guard >= 0) fault(w, i, "a predicated call");
    Frame& caller = *w.top;
    if (independent && !caller.groups.empty() && !caller.released) {
        caller.groups.push_back({caller.pc - 1, caller.mask, false, true});
        choose(w, caller);
        return;
    }
    caller.released = false;
    Function& to = *i.callee;
    enter(w, to, w.mask, &i);
    Frame& f = *w.top;
    for (size_t k = 0; k < to.parameters.size(); ++k) {
        const Parameter& p = to.parameters[k];
        EACH(std::memcpy(&f.area[l * to.area + p.offset], &caller.area[l * caller.function->area + i.arguments[k]], p.size));
    }
}

void leave(Warp& w, const Ins& i)
{
    if (i.guard >= 0) fault(w, i, "a predicated return");
    Frame& f = *w.top;
    if (w.depth == 1) {
        w.live &= ~w.mask;
        if (w.live == 0) {
            w.state = State::done;
            --w.block->running;
            return;
        }
        for (Group& g : f.groups) g.blocked = false;
    }
    if (!f.groups.empty()) {
        choose(w, f);
        return;
    }
    if (w.depth == 1) fault(w, i, "lanes are lost");
    const Ins& site = *f.call;
    --w.depth;
    w.used = f.regs;
    Frame& caller = *w.frames[w.depth - 1];
    w.top = &caller;
    w.regs = w.arena.data() + caller.regs;
    w.preds = caller.preds.data();
    w.def = caller.def.data();
    w.mask = f.mask0;
    if (site.result != NO_PC) {
        EACH(std::memcpy(&caller.area[l * caller.function->area + site.result],
                         &f.area[l * f.function->area + f.function->result.offset], f.function->result.size));
    }
}

void trap(Warp& w, const Ins& i) { fault(w, i, "a trap"); }
void nothing(Warp&, const Ins&) {}
void fence(Warp& w, const Ins&) { races.fence(w); }

// ---- memory

// Where a lane's local memory begins: the same number in its own space and in the generic one.
u64 local_of(const Warp& w, u32 lane)
{
    Block& b = *w.block;
    return reinterpret_cast<u64>(b.local.data()) + (w.index * LANES + lane) * b.run->module->local_size;
}

u8* resolve(Warp& w, const Ins& i, u32 lane, u64 address, u32 n, bool write, bool atomic)
{
    if (address % n != 0) fault(w, i, "a misaligned access of lane %u to %llx", lane, (unsigned long long)address);
    Block& b = *w.block;
    Run& run = *b.run;
    const u64 own = reinterpret_cast<u64>(b.shared.data());
    Space space = i.space;
    if (space == Space::generic && address - own < b.shared.size()) {
        space = Space::shared;
        address -= own;
    }
    if (space == Space::shared) {
        if (address < SHARED_BASE || address + n > b.shared.size()) {
            fault(w, i, "lane %u: beyond shared memory: %llx", lane, (unsigned long long)address);
        }
        u8* init = &b.shared_init[address];
        if (write) {
            std::memset(init, 1, n);
        }
        if (!write || atomic) {
            for (u32 k = 0; k < n; ++k) i.uninitialised += init[k] == 0;
        }
        races.shared_access(w, i, lane, address, n, write);
        return &b.shared[address];
    }
    if (space == Space::local || (space == Space::generic && address - reinterpret_cast<u64>(b.local.data()) < b.local.size())) {
        const u64 size = b.run->module->local_size, begin = local_of(w, lane);
        if (address < begin || address + n > begin + size) fault(w, i, "lane %u: beyond its local memory", lane);
        return reinterpret_cast<u8*>(address);
    }
    if (space == Space::generic) {
        const u64 params = reinterpret_cast<u64>(run.parameters.data());
        if (address - params < run.parameters.size()) {
            if (write || address - params + n > run.parameters.size()) fault(w, i, "a wrong access to parameters");
            return reinterpret_cast<u8*>(address);
        }
    }
    const std::vector<Allocation>& memory = run.memory;
    const auto holds = [&](u32 k) { return k < memory.size() && address >= memory[k].begin && address + n <= memory[k].end; };
    if (!holds(i.hint)) {
        const auto next = std::upper_bound(memory.begin(), memory.end(), address,
                                           [](u64 x, const Allocation& m) { return x < m.begin; });
        i.hint = static_cast<u32>(next - memory.begin()) - 1;
        if (next == memory.begin() || !holds(i.hint)) {
            fault(w, i, "lane %u: %s %u bytes at %llx, outside of any allocation", lane, write ? "writes" : "reads", n,
                  (unsigned long long)address);
        }
    }
    const Allocation& m = memory[i.hint];
    if (write && m.read_only) fault(w, i, "lane %u writes to memory that is only read", lane);
    if (m.init != nullptr) {
        u8* init = m.init + (address - m.begin);
        if (!write || atomic) {
            for (u32 k = 0; k < n; ++k) i.uninitialised += init[k] == 0;
        }
        if (write) std::memset(init, 1, n);
    }
    races.global_access(w, i, lane, address, n, write, i.strong || atomic, atomic);
    return reinterpret_cast<u8*>(address);
}

inline u64 address_of(Warp& w, const Ins& i, u32 lane)
{
    return (i.a.width == 0 ? 0 : at<u64>(w, i.a)[lane]) + static_cast<u64>(i.offset);
}

// Where an element of .param space lies.
u8* parameter(Warp& w, const Ins& i, u32 lane, u32 n)
{
    if (i.space == Space::param_own) {
        return &w.top->area[lane * w.top->function->area + static_cast<u64>(i.offset)];
    }
    Run& run = *w.block->run;
    const u64 address = address_of(w, i, lane);
    if (address < PARAM_BASE || address + n > PARAM_BASE + run.parameters.size() || address % n != 0) {
        fault(w, i, "a wrong address of a parameter: %llx", (unsigned long long)address);
    }
    return &run.parameters[address - PARAM_BASE];
}

void load_memory(Warp& w, const Ins& i)
{
    if (i.a.width != 0) need(w, i, i.a);
    const u32 n = i.size * i.count;
    const bool param = i.space == Space::param_own || i.space == Space::param_kernel;
    for (u32 r = w.mask; r != 0; r &= r - 1) {
        const u32 lane = std::countr_zero(r);
        const u8* from = param ? parameter(w, i, lane, n) : resolve(w, i, lane, address_of(w, i, lane), n, false, false);
        u8 bytes[32];
        std::memcpy(bytes, from, n);
        for (u32 k = 0; k < i.count; ++k) {
            const Op& o = i.v[k];
            u64 value = 0;
            std::memcpy(&value, bytes + k * i.size, i.size);
            std::memcpy(at<u8>(w, o) + lane * o.width, &value, o.width);
        }
    }
    for (u32 k = 0; k < i.count; ++k) mark(w, i.v[k]);
}

void store_memory(Warp& w, const Ins& i)
{
    if (i.a.width != 0) need(w, i, i.a);
    const u32 n = i.size * i.count;
    const bool param = i.space == Space::param_own || i.space == Space::param_kernel;
    if (i.space == Space::param_kernel) fault(w, i, "a store to the kernel's parameters");
    for (u32 k = 0; k < i.count; ++k) need(w, i, i.v[k]);
    for (u32 r = w.mask; r != 0; r &= r - 1) {
        const u32 lane = std::countr_zero(r);
        u8 bytes[32];
        for (u32 k = 0; k < i.count; ++k) {
            const Op& o = i.v[k];
            std::memcpy(bytes + k * i.size, at<u8>(w, o) + lane * o.width, i.size);
        }
        u8* to = param ? parameter(w, i, lane, n) : resolve(w, i, lane, address_of(w, i, lane), n, true, false);
        std::memcpy(to, bytes, n);
    }
}

template <class T, auto F>
void atomic(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    need(w, i, i.b);
    for (u32 r = w.mask; r != 0; r &= r - 1) {
        const u32 lane = std::countr_zero(r);
        T* p = reinterpret_cast<T*>(resolve(w, i, lane, address_of(w, i, lane), sizeof(T), true, true));
        const T old = *p;
        *p = F(old, at<T>(w, i.b)[lane]);
        at<T>(w, i.d)[lane] = old;
    }
    mark(w, i.d);
}

void local_address(Warp& w, const Ins& i)
{
    u64* d = at<u64>(w, i.d);
    EACH(d[l] = local_of(w, l) + static_cast<u64>(i.offset));
    mark(w, i.d);
}

// Any address will do: nothing is read.
void prefetch(Warp& w, const Ins& i) { need(w, i, i.a); }

void address_to(Warp& w, const Ins& i)
{
    need(w, i, i.a);
    const u64* a = at<u64>(w, i.a);
    u64* d = at<u64>(w, i.d);
    Block& b = *w.block;
    const u64 shared = reinterpret_cast<u64>(b.shared.data()), params = reinterpret_cast<u64>(b.run->parameters.data());
    EACH(u64 x = a[l]; switch (i.count) {
        case 0:  // cvta.shared
            if (x < SHARED_BASE || x > b.shared.size()) fault(w, i, "no shared address");
            x += shared;
            break;
        case 1:  // cvta.to.shared
            if (x - shared > b.shared.size()) fault(w, i, "a generic address that isn't shared");
            x -= shared;
            break;
        case 2:  // cvta.param
            if (x < PARAM_BASE || x > PARAM_BASE + b.run->parameters.size()) fault(w, i, "no parameter");
            x += params - PARAM_BASE;
            break;
        default:  // cvta.to.global: the same number, but not for shared memory
            if (x - shared < b.shared.size()) fault(w, i, "a generic address that isn't global");
    } d[l] = x);
    mark(w, i.d);
}

template <int WHICH>
void special(Warp& w, const Ins& i)
{
    u32* d = at<u32>(w, i.d);
    Run& run = *w.block->run;
    EACH(u32 x = 0; switch (WHICH) {
        case 0: x = w.index * LANES + l; break;
        case 1: x = w.block->index; break;
        case 2: x = run.launch->grid; break;
        case 3: x = run.launch->block; break;
        case 4: x = 0; break;  // tid.y, ctaid.y ...
        case 5: x = 1; break;  // nctaid.y ...
        // The address of the grid barrier's workspace: envreg1 is its high half.
        case 6: x = static_cast<u32>(run.workspace >> 32); break;
        default: x = static_cast<u32>(run.workspace);
    } d[l] = x);
    mark(w, i.d);
}

// ---- opcodes

struct Spec {
    Handler fn;
    std::vector<int> widths;  // of the destination and the sources
};

const std::unordered_map<string, Spec>& specs()
{
    static const std::unordered_map<string, Spec> table = [] {
        std::unordered_map<string, Spec> t;
#define UN(NAME, D, A, F) t[NAME] = {unary<D, A, [](A a) -> D { return (F); }>, {sizeof(D), sizeof(A)}}
#define BIN(NAME, T, F) t[NAME] = {binary<T, T, T, [](T a, T b) -> T { return (F); }>, {sizeof(T), sizeof(T), sizeof(T)}}
        BIN("add.s32", u32, a + b);
        BIN("add.s64", u64, a + b);
        BIN("add.u64", u64, a + b);
        BIN("add.s16", u16, static_cast<u16>(a + b));
        BIN("sub.s32", u32, a - b);
        BIN("sub.s64", u64, a - b);
        BIN("mul.lo.s32", u32, a * b);
        BIN("mul.lo.s64", u64, a * b);
        t["mad.lo.s32"] = {ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return a * b + c; }>, {4, 4, 4, 4}};
        t["mad.lo.s64"] = {ternary<u64, u64, u64, u64, [](u64 a, u64 b, u64 c) { return a * b + c; }>, {8, 8, 8, 8}};
        t["mul.wide.u32"] = {binary<u64, u32, u32, [](u32 a, u32 b) { return static_cast<u64>(a) * b; }>, {8, 4, 4}};
        t["mul.wide.s32"] = {binary<i64, i32, i32, [](i32 a, i32 b) { return static_cast<i64>(a) * b; }>, {8, 4, 4}};
        UN("neg.s32", u32, u32, 0 - a);
        UN("not.b32", u32, u32, ~a);
        UN("not.b64", u64, u64, ~a);
#define BITS(W)                       \
    BIN("and.b" #W, u##W, a & b);     \
    BIN("or.b" #W, u##W, a | b);      \
    BIN("xor.b" #W, u##W, a ^ b)
        BITS(16);
        BITS(32);
        BITS(64);
#define SHIFT(NAME, T, F) t[NAME] = {binary<T, T, u32, [](T a, u32 b) -> T { return (F); }>, {sizeof(T), sizeof(T), 4}}
        SHIFT("shl.b32", u32, b >= 32 ? 0 : a << b);
        SHIFT("shl.b64", u64, b >= 64 ? 0 : a << b);
        SHIFT("shr.u16", u16, b >= 16 ? 0 : a >> b);
        SHIFT("shr.u32", u32, b >= 32 ? 0 : a >> b);
        SHIFT("shr.u64", u64, b >= 64 ? 0 : a >> b);
        SHIFT("shr.s32", i32, a >> (b >= 32 ? 31 : b));
        SHIFT("shr.s64", i64, a >> (b >= 64 ? 63 : b));
        BIN("min.s32", i32, a < b ? a : b);
        BIN("max.s32", i32, a > b ? a : b);
        BIN("min.u32", u32, a < b ? a : b);
        BIN("max.u32", u32, a > b ? a : b);
        BIN("min.u64", u64, a < b ? a : b);
        BIN("max.u64", u64, a > b ? a : b);
        BIN("min.f64", f64, smaller(a, b));
        BIN("max.f64", f64, larger(a, b));
        t["div.u16"] = {divide<u16, false>, {2, 2, 2}};
        t["div.u32"] = {divide<u32, false>, {4, 4, 4}};
        t["div.u64"] = {divide<u64, false>, {8, 8, 8}};
        t["rem.u16"] = {divide<u16, true>, {2, 2, 2}};
        t["rem.u32"] = {divide<u32, true>, {4, 4, 4}};
        t["rem.u64"] = {divide<u64, true>, {8, 8, 8}};
        BIN("add.rn.f32", f32, canonical(a + b));
        BIN("sub.rn.f32", f32, canonical(a - b));
        BIN("mul.rn.f32", f32, canonical(a * b));
        BIN("add.rn.f64", f64, a + b);
        BIN("sub.rn.f64", f64, a - b);
        BIN("mul.rn.f64", f64, a * b);
        BIN("div.rn.f64", f64, a / b);
        UN("sqrt.rn.f64", f64, f64, std::sqrt(a));
        UN("rcp.rn.f64", f64, f64, 1.0 / a);
        UN("rcp.approx.ftz.f64", f64, f64, rough_reciprocal(a));
        t["fma.rn.f64"] = {ternary<f64, f64, f64, f64, [](f64 a, f64 b, f64 c) { return std::fma(a, b, c); }>, {8, 8, 8, 8}};
        UN("neg.f64", u64, u64, a ^ 0x8000000000000000ull);
        UN("abs.f64", u64, u64, a & 0x7FFFFFFFFFFFFFFFull);
        UN("abs.f32", u32, u32, a & 0x7FFFFFFFu);
        UN("brev.b32", u32, u32, [](u32 x) {
            u32 y = 0;
            for (int k = 0; k < 32; ++k) y |= (x >> k & 1) << (31 - k);
            return y;
        }(a));
        UN("popc.b32", u32, u32, static_cast<u32>(std::popcount(a)));
        UN("clz.b32", u32, u32, static_cast<u32>(std::countl_zero(a)));
        UN("clz.b64", u32, u64, static_cast<u32>(std::countl_zero(a)));
        UN("bfind.shiftamt.u32", u32, u32, a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)));
        t["prmt.b32"] = {ternary<u32, u32, u32, u32, permute>, {4, 4, 4, 4}};
        t["bfi.b32"] = {insert_bits<u32>, {4, 4, 4, 4, 4}};
        t["bfi.b64"] = {insert_bits<u64>, {8, 8, 8, 4, 4}};
        // Conversions.
        UN("cvt.u32.u64", u32, u64, static_cast<u32>(a));
        UN("cvt.u64.u32", u64, u32, a);
        UN("cvt.u64.u16", u64, u16, a);
        UN("cvt.s32.s64", u32, u64, static_cast<u32>(a));
        UN("cvt.u16.u64", u16, u64, static_cast<u16>(a));
        UN("cvt.u32.u8", u32, u16, a & 0xFF);
        UN("cvt.u16.u8", u16, u16, a & 0xFF);
        UN("cvt.s64.s32", i64, i32, a);
        UN("cvt.u32.u16", u32, u16, a);
        UN("cvt.u16.u32", u16, u32, static_cast<u16>(a));
        UN("cvt.f64.f32", f64, f32, static_cast<f64>(a));
        UN("cvt.rn.f32.f64", f32, f64, canonical(static_cast<f32>(a)));
        UN("cvt.f32.f16", f32, u16, widen_f16(a));
        UN("cvt.rn.f16.f32", u16, f32, narrow_f16(a));
        UN("cvt.rn.f32.u32", f32, u32, static_cast<f32>(a));
        UN("cvt.rn.f64.u32", f64, u32, static_cast<f64>(a));
        UN("cvt.rn.f64.s32", f64, i32, static_cast<f64>(a));
        UN("cvt.rn.f64.u64", f64, u64, static_cast<f64>(a));
        UN("cvt.rzi.u32.f32", u32, f32, (to_integer<u32, f32>(a)));
        UN("cvt.rzi.u64.f64", u64, f64, (to_integer<u64, f64>(a)));
        UN("cvt.rmi.f32.f32", f32, f32, canonical(std::floor(a)));
        UN("cvt.rpi.f64.f64", f64, f64, std::ceil(a));
        // Comparisons.
#define CMP(NAME, T, F) t["setp." NAME] = {compare<T, [](T a, T b) -> bool { return (F); }>, {1, sizeof(T), sizeof(T)}}
#define CMPS(S, T)           \
    CMP("eq." S, T, a == b); \
    CMP("ne." S, T, a != b); \
    CMP("lt." S, T, a < b);  \
    CMP("le." S, T, a <= b); \
    CMP("gt." S, T, a > b);  \
    CMP("ge." S, T, a >= b)
        CMPS("u32", u32);
        CMPS("s32", i32);
        CMPS("u64", u64);
        CMPS("s64", i64);
        CMPS("s16", i16);
        CMPS("u16", u16);
        CMP("eq.b16", u16, a == b);
        CMP("eq.b32", u32, a == b);
        CMP("eq.b64", u64, a == b);
#define FCMPS(S, T)                                           \
    CMP("eq." S, T, a == b);                                  \
    CMP("ne." S, T, a < b || a > b);                          \
    CMP("lt." S, T, a < b);                                   \
    CMP("le." S, T, a <= b);                                  \
    CMP("gt." S, T, a > b);                                   \
    CMP("ge." S, T, a >= b);                                  \
    CMP("equ." S, T, !(a < b || a > b));                      \
    CMP("neu." S, T, !(a == b));                              \
    CMP("ltu." S, T, !(a >= b));                              \
    CMP("leu." S, T, !(a > b));                               \
    CMP("gtu." S, T, !(a <= b));                              \
    CMP("geu." S, T, !(a < b));                               \
    CMP("num." S, T, a == a && b == b);                       \
    CMP("nan." S, T, a != a || b != b)
        FCMPS("f32", f32);
        FCMPS("f64", f64);
        for (const char* type : {"b16", "u16", "s16"}) t[string("selp.") + type] = {select<u16>, {2, 2, 2, 1}};
        for (const char* type : {"b32", "u32", "s32", "f32"}) t[string("selp.") + type] = {select<u32>, {4, 4, 4, 1}};
        for (const char* type : {"b64", "u64", "s64", "f64"}) t[string("selp.") + type] = {select<u64>, {8, 8, 8, 1}};
        t["and.pred"] = {logic<[](u32 a, u32 b) { return a & b; }>, {1, 1, 1}};
        t["or.pred"] = {logic<[](u32 a, u32 b) { return a | b; }>, {1, 1, 1}};
        t["xor.pred"] = {logic<[](u32 a, u32 b) { return a ^ b; }>, {1, 1, 1}};
        t["not.pred"] = {not_pred, {1, 1}};
        t["bar.sync"] = t["barrier.sync"] = {block_barrier<false>, {0, -1}};
        t["bar.red.and.pred"] = {block_barrier<true>, {1, -1, 1}};
        t["bar.warp.sync"] = {warp_barrier, {0, 4}};
        t["vote.sync.ballot.b32"] = {ballot, {4, 1, 4}};
        t["membar.gl"] = t["membar.sys"] = t["fence.acq_rel.gpu"] = t["fence.acq_rel.sys"] = {fence, {0}};
        t["cvta.local.u64"] = {move<u64>, {8, 8}};
        t["trap"] = {trap, {0}};
        t["ret"] = {leave, {0}};
        t["cvta.shared.u64"] = t["cvta.to.shared.u64"] = t["cvta.param.u64"] = t["cvta.to.global.u64"] = {address_to, {8, 8}};
        return t;
    }();
    return table;
}

// ---- parser

string trim(std::string_view s)
{
    const size_t a = s.find_first_not_of(" \t\r\n"), b = s.find_last_not_of(" \t\r\n");
    return a == s.npos ? "" : string(s.substr(a, b - a + 1));
}

std::vector<string> split(std::string_view s)
{
    std::vector<string> parts;
    int depth = 0;
    size_t begin = 0;
    for (size_t k = 0; k <= s.size(); ++k) {
        const char c = k < s.size() ? s[k] : ',';
        depth += c == '(' || c == '[' || c == '{';
        depth -= c == ')' || c == ']' || c == '}';
        if (c == ',' && depth == 0) {
            const string part = trim(s.substr(begin, k - begin));
            if (!part.empty()) parts.push_back(part);
            begin = k + 1;
        }
    }
    return parts;
}

struct Register {
    u32 width, off, reg;
};

struct Scope {
    std::unordered_map<string, Register> names;
    // %r<N>: prefix, first register, how many, bytes between them
    struct Range {
        string prefix;
        Register first;
        u32 count;
    };
    std::vector<Range> ranges;
    std::unordered_map<string, Parameter> params;  // of calls
};

int width_of(const string& type)
{
    if (type == ".pred") return 1;
    const string digits = type.substr(2);
    const int bits = std::atoi(digits.c_str());
    if (bits % 8 != 0 || bits < 8 || bits > 64) fail("unknown type %s", type.c_str());
    return bits / 8;
}

class Parser {
public:
    Parser(Module& module, string text) : module_(module), text_(std::move(text)) {}

    void parse()
    {
        strip();
        for (;;) {
            skip();
            if (at_ >= text_.size()) break;
            const char c = text_[at_];
            if (c == '{') {
                if (function_ == nullptr) error("a scope outside of functions");
                scopes_.emplace_back();
                ++at_;
            } else if (c == '}') {
                scopes_.pop_back();
                ++at_;
                if (scopes_.empty()) finish();
            } else {
                statement();
            }
        }
        for (auto& [name, f] : module_.functions) {
            if (!f->defined) fail("function %s is not defined", name.c_str());
        }
    }

private:
    [[noreturn]] void error(const string& what) { fail("line %u: %s", line_, what.c_str()); }

    void strip()
    {
        for (size_t k = 0; k + 1 < text_.size(); ++k) {
            if (text_[k] == '/' && text_[k + 1] == '/') {
                while (k < text_.size() && text_[k] != '\n') text_[k++] = ' ';
            } else if (text_[k] == '/' && text_[k + 1] == '*') {
                for (; !(text_[k] == '*' && text_[k + 1] == '/') || text_[k - 1] == '/'; ++k) {
                    if (text_[k] != '\n') text_[k] = ' ';
                }
                text_[k] = text_[k + 1] = ' ';
            }
        }
    }

    void skip()
    {
        for (; at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])); ++at_) line_ += text_[at_] == '\n';
    }

    string take(const char* ends)
    {
        int depth = 0;
        const size_t begin = at_;
        const bool header = std::strchr(ends, '{') != nullptr;
        for (; at_ < text_.size(); ++at_) {
            const char c = text_[at_];
            if (!header) {
                depth += c == '{';
                depth -= c == '}';
            }
            if (depth == 0 && std::strchr(ends, c) != nullptr) break;
            line_after_ += c == '\n';
        }
        return text_.substr(begin, at_ - begin);
    }

    void statement()
    {
        line_after_ = 0;
        if (text_.compare(at_, 6, ".entry") == 0 || text_.compare(at_, 5, ".func") == 0 || text_.compare(at_, 8, ".visible") == 0) {
            const string header = take(";{");
            if (text_[at_] == ';') {
                ++at_;
                declare(header);
            } else {
                define(header);
            }
            line_ += line_after_;
            return;
        }
        // A label.
        size_t k = at_;
        while (std::isalnum(static_cast<unsigned char>(text_[k])) || text_[k] == '$' || text_[k] == '_') ++k;
        if (k > at_ && text_[k] == ':') {
            labels_[text_.substr(at_, k - at_)] = static_cast<u32>(function_->code.size());
            at_ = k + 1;
            return;
        }
        // .version and so on end with their line.
        for (const char* directive : {".version", ".target", ".address_size"}) {
            if (text_.compare(at_, std::strlen(directive), directive) == 0) {
                take("\n");
                line_ += line_after_;
                return;
            }
        }
        const string s = take(";");
        ++at_;
        if (s[0] == '.') {
            directive(trim(s));
        } else {
            instruction(trim(s));
        }
        line_ += line_after_;
    }

    static std::vector<string> words(const string& s)
    {
        std::vector<string> result;
        size_t k = 0;
        while (k < s.size()) {
            while (k < s.size() && std::isspace(static_cast<unsigned char>(s[k]))) ++k;
            size_t b = k;
            while (k < s.size() && !std::isspace(static_cast<unsigned char>(s[k]))) ++k;
            if (k > b) result.push_back(s.substr(b, k - b));
        }
        return result;
    }

    // ".param .align 8 .b8 name[16]" or ".param .b64 name"; `offset` moves on.
    Parameter param(const string& s, u32& offset)
    {
        u32 align = 0;
        string type, name;
        const std::vector<string> w = words(s);
        for (size_t k = 0; k < w.size(); ++k) {
            if (w[k] == ".param" || w[k] == ".shared" || w[k] == ".local" || w[k] == ".reg") continue;
            if (w[k] == ".align") {
                align = static_cast<u32>(std::atoi(w[++k].c_str()));
            } else if (w[k][0] == '.') {
                type = w[k];
            } else {
                name += w[k];
            }
        }
        u32 size = static_cast<u32>(width_of(type));
        align = std::max(align, size);
        const size_t bracket = name.find('[');
        if (bracket != name.npos) {
            size *= static_cast<u32>(std::atoi(name.c_str() + bracket + 1));
            name.resize(bracket);
        }
        offset = (offset + align - 1) / align * align;
        Parameter p{name, size, offset};
        offset += size;
        return p;
    }

    Function& function_named(const string& name)
    {
        auto& f = module_.functions[name];
        if (f == nullptr) {
            f = std::make_unique<Function>();
            f->name = name;
        }
        return *f;
    }

    void declare(const string&) {}  // every function is defined later

    void define(const string& header)
    {
        string s = header;
        const bool entry = s.find(".entry") != s.npos;
        size_t k = entry ? s.find(".entry") + 6 : s.find(".func") + 5;
        while (std::isspace(static_cast<unsigned char>(s[k]))) ++k;
        string result;
        if (s[k] == '(') {
            const size_t close = s.find(')', k);
            result = s.substr(k + 1, close - k - 1);
            k = close + 1;
            while (std::isspace(static_cast<unsigned char>(s[k]))) ++k;
        }
        const size_t open = s.find('(', k);
        Function& f = function_named(trim(std::string_view(s).substr(k, open - k)));
        if (f.defined) error("defined twice: " + f.name);
        f.defined = true;
        f.entry = entry;
        const size_t close = s.find(')', open);
        u32 offset = 0;
        for (const string& p : split(std::string_view(s).substr(open + 1, close - open - 1))) f.parameters.push_back(param(p, offset));
        f.parameter_bytes = offset;
        if (!result.empty()) f.result = param(result, offset);
        f.area = offset;
        function_ = &f;
        labels_.clear();
        fixups_.clear();
    }

    void finish()
    {
        Function& f = *function_;
        f.area = (f.area + 15) / 16 * 16;
        f.frame = (f.frame + 63) / 64 * 64;
        for (const auto& [at, label] : fixups_) {
            const auto found = labels_.find(label);
            if (found == labels_.end()) fail("%s: no label %s", f.name.c_str(), label.c_str());
            f.code[at].target = found->second;
        }
        if (f.code.empty() || (f.code.back().fn != static_cast<Handler>(leave) && f.code.back().fn != static_cast<Handler>(branch))) {
            fail("%s does not end with a return", f.name.c_str());
        }
        function_ = nullptr;
    }

    void directive(const string& s)
    {
        const std::vector<string> w = words(s);
        if (w[0] == ".pragma" || w[0] == ".maxntid" || w[0] == ".minnctapersm" || w[0] == ".global") return;
        if (w[0] == ".shared") {
            u32 offset = static_cast<u32>(module_.shared_size);
            offset = (offset + 15) / 16 * 16;
            const Parameter p = param(s, offset);
            module_.shared[p.name] = p.offset;
            // A gap behind each, so that an access beyond it is noticed.
            module_.shared_size = offset + 64;
            return;
        }
        if (function_ == nullptr) error("unknown directive: " + s);
        if (w[0] == ".local") {
            // Each function has a place of its own: none calls itself.
            u32 offset = static_cast<u32>(module_.local_size);
            const Parameter p = param(s, offset);
            module_.local[p.name] = p.offset;
            module_.local_size = (offset + 15) / 16 * 16;
            return;
        }
        if (w[0] == ".param") {
            const Parameter p = param(s, function_->area);
            scopes_.back().params[p.name] = p;
            return;
        }
        if (w[0] == ".reg") {
            const u32 width = static_cast<u32>(width_of(w[1]));
            for (size_t k = 2; k < w.size(); ++k) {
                string name = w[k];
                const size_t angle = name.find('<');
                const u32 count = angle == name.npos ? 1 : static_cast<u32>(std::atoi(name.c_str() + angle + 1));
                Register first{width, 0, function_->regs};
                function_->regs += count;
                if (width == 1) {
                    first.off = function_->preds;
                    function_->preds += count;
                } else {
                    function_->frame = (function_->frame + 63) / 64 * 64;
                    first.off = static_cast<u32>(function_->frame);
                    function_->frame += static_cast<size_t>(count) * width * LANES;
                }
                if (angle == name.npos) {
                    scopes_.back().names[name] = first;
                } else {
                    scopes_.back().ranges.push_back({name.substr(0, angle), first, count});
                }
            }
            return;
        }
        error("unknown directive: " + s);
    }

    bool find_register(const string& name, Register& found)
    {
        size_t digits = name.size();
        while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
        const string prefix = name.substr(0, digits);
        for (size_t s = scopes_.size(); s-- > 0;) {
            const auto exact = scopes_[s].names.find(name);
            if (exact != scopes_[s].names.end()) {
                found = exact->second;
                return true;
            }
            if (digits == name.size()) continue;
            const u32 n = static_cast<u32>(std::atoi(name.c_str() + digits));
            for (const Scope::Range& r : scopes_[s].ranges) {
                if (r.prefix == prefix && n < r.count) {
                    found = r.first;
                    found.reg += n;
                    found.off += r.first.width == 1 ? n : n * r.first.width * LANES;
                    return true;
                }
            }
        }
        return false;
    }

    static bool is_number(const string& s)
    {
        return !s.empty() && (std::isdigit(static_cast<unsigned char>(s[0])) || (s[0] == '-' && s.size() > 1));
    }

    u64 number(const string& s, int width)
    {
        if (s.size() == 10 && s.compare(0, 2, "0f") == 0) {
            if (width != 4) error("a single precision number for another type");
            return std::strtoull(s.c_str() + 2, nullptr, 16);
        }
        if (s.size() == 18 && s.compare(0, 2, "0d") == 0) {
            if (width != 8) error("a double precision number for another type");
            return std::strtoull(s.c_str() + 2, nullptr, 16);
        }
        char* end = nullptr;
        const u64 value = s[0] == '-' ? static_cast<u64>(std::strtoll(s.c_str(), &end, 0)) : std::strtoull(s.c_str(), &end, 0);
        if (*end != 0) error("not a number: " + s);
        return value;
    }

    Op reg(const string& s, int width)
    {
        Register r;
        if (!find_register(s, r)) error("no register: " + s);
        if (static_cast<int>(r.width) != width) error("a register of another width: " + s);
        Op o;
        o.off = r.off;
        o.reg = r.reg;
        o.width = static_cast<u8>(r.width);
        return o;
    }

    // For memory, whose registers may be wider than the element.
    Op any_reg(const string& s, int least)
    {
        Register r;
        if (!find_register(s, r)) error("no register: " + s);
        if (r.width == 1 || static_cast<int>(r.width) < least) error("a register that is too narrow: " + s);
        Op o;
        o.off = r.off;
        o.reg = r.reg;
        o.width = static_cast<u8>(r.width);
        return o;
    }

    Op source(const string& s, int width)
    {
        if (is_number(s)) {
            Op o;
            o.width = static_cast<u8>(width);
            o.konst = module_.constant(number(s, width), static_cast<u32>(width));
            return o;
        }
        return reg(s, width);
    }

    const Parameter* local_param(const string& name)
    {
        for (size_t s = scopes_.size(); s-- > 0;) {
            const auto found = scopes_[s].params.find(name);
            if (found != scopes_[s].params.end()) return &found->second;
        }
        return nullptr;
    }

    // "[%rd1+8]", "[name+8]", "[name]"
    void address(Ins& i, const string& s, bool param)
    {
        if (s.size() < 3 || s[0] != '[' || s.back() != ']') error("not an address: " + s);
        string base = s.substr(1, s.size() - 2);
        const size_t plus = base.find('+');
        if (plus != base.npos) {
            i.offset = static_cast<i64>(number(trim(base.substr(plus + 1)), 8));
            base = trim(base.substr(0, plus));
        }
        if (base[0] == '%') {
            i.a = reg(base, 8);
            if (param) i.space = Space::param_kernel;
            return;
        }
        if (param) {
            if (const Parameter* p = local_param(base)) {
                i.space = Space::param_own;
                if (i.offset < 0 || i.offset + i.size * i.count > p->size) error("beyond a parameter");
                i.offset += p->offset;
                return;
            }
            if (base == function_->result.name) {
                i.space = Space::param_own;
                if (i.offset < 0 || i.offset + i.size * i.count > function_->result.size) error("beyond a result");
                i.offset += function_->result.offset;
                return;
            }
            for (const Parameter& p : function_->parameters) {
                if (p.name == base) {
                    if (i.offset < 0 || i.offset + i.size * i.count > p.size) error("beyond a parameter");
                    i.space = function_->entry ? Space::param_kernel : Space::param_own;
                    i.offset += p.offset + (function_->entry ? PARAM_BASE : 0);
                    return;
                }
            }
            error("no parameter: " + base);
        }
        const auto shared = module_.shared.find(base);
        if (shared == module_.shared.end() || i.space != Space::shared) error("no such variable: " + base);
        i.offset += static_cast<i64>(shared->second);
    }

    static std::vector<string> dotted(const string& s)
    {
        std::vector<string> parts;
        size_t b = 0;
        for (size_t k = 0; k <= s.size(); ++k) {
            if (k == s.size() || s[k] == '.') {
                parts.push_back(s.substr(b, k - b));
                b = k + 1;
            }
        }
        return parts;
    }

    void memory(Ins& i, const string& mnemonic, const std::vector<string>& ops, bool store)
    {
        const std::vector<string> parts = dotted(mnemonic);
        bool param = false;
        for (size_t k = 1; k + 1 < parts.size(); ++k) {
            const string& p = parts[k];
            if (p == "global") i.space = Space::global;
            else if (p == "shared") i.space = Space::shared;
            else if (p == "local") i.space = Space::local;
            else if (p == "param") param = true;
            else if (p == "v2") i.count = 2;
            else if (p == "v4") i.count = 4;
            else if (p == "volatile") i.strong = true;
            else if (p == "acquire") i.strong = i.acquire = true;
            else if (p == "cg") i.past_l1 = true;
            else if (p == "gpu" || p == "cs" || p == "nc") {}
            else error("unknown qualifier of memory: " + p);
        }
        const string& type = parts.back();
        if (type[0] == 's') error("a signed load");
        i.size = static_cast<u8>(width_of("." + type));
        if (ops.size() != 2) error("operands");
        const string& values = store ? ops[1] : ops[0];
        address(i, store ? ops[0] : ops[1], param);
        std::vector<string> names{values};
        if (values[0] == '{') names = split(std::string_view(values).substr(1, values.size() - 2));
        if (names.size() != i.count) error("elements of a vector");
        for (size_t k = 0; k < names.size(); ++k) {
            i.v[k] = store && is_number(names[k]) ? source(names[k], i.size) : any_reg(names[k], i.size);
        }
        i.fn = store ? static_cast<Handler>(store_memory) : static_cast<Handler>(load_memory);
    }

    void mov(Ins& i, const string& mnemonic, const std::vector<string>& ops)
    {
        if (ops.size() != 2) error("operands");
        const int width = width_of(mnemonic.substr(3));
        if (ops[0][0] == '{') {
            const std::vector<string> names = split(std::string_view(ops[0]).substr(1, ops[0].size() - 2));
            i.count = static_cast<u8>(names.size());
            i.a = source(ops[1], width);
            for (size_t k = 0; k < names.size(); ++k) i.v[k] = reg(names[k], width / static_cast<int>(names.size()));
            i.fn = unpack;
            return;
        }
        i.d = reg(ops[0], width);
        if (ops[1][0] == '{') {
            const std::vector<string> names = split(std::string_view(ops[1]).substr(1, ops[1].size() - 2));
            i.count = static_cast<u8>(names.size());
            for (size_t k = 0; k < names.size(); ++k) i.v[k] = source(names[k], width / static_cast<int>(names.size()));
            i.fn = pack;
            return;
        }
        static const std::map<string, Handler> specials = {
            {"%tid.x", special<0>},    {"%ctaid.x", special<1>},  {"%nctaid.x", special<2>}, {"%ntid.x", special<3>},
            {"%tid.y", special<4>},    {"%tid.z", special<4>},    {"%ctaid.y", special<4>},  {"%ctaid.z", special<4>},
            {"%nctaid.y", special<5>}, {"%nctaid.z", special<5>}, {"%ntid.y", special<5>},   {"%ntid.z", special<5>},
            {"%envreg1", special<6>},  {"%envreg2", special<7>}};
        if (const auto s = specials.find(ops[1]); s != specials.end()) {
            if (width != 4) error("a special register of another width");
            i.fn = s->second;
            return;
        }
        if (width == 1) {
            if (is_number(ops[1])) {
                i.a.konst = module_.constant(number(ops[1], 1), 1);
                i.a.width = 1;
            } else {
                i.a = reg(ops[1], 1);
            }
            i.fn = move_pred;
            return;
        }
        if (ops[1][0] != '%' && !is_number(ops[1])) {
            // The address of a variable or of a kernel's parameter, in its own space.
            if (width != 8) error("an address of another width");
            if (const auto local = module_.local.find(ops[1]); local != module_.local.end()) {
                i.offset = static_cast<i64>(local->second);
                i.fn = local_address;
                return;
            }
            u64 address = 0;
            if (const auto shared = module_.shared.find(ops[1]); shared != module_.shared.end()) {
                address = shared->second;
            } else {
                for (const Parameter& p : function_->parameters) {
                    if (p.name == ops[1] && function_->entry) address = PARAM_BASE + p.offset;
                }
                if (address == 0) error("no such variable: " + ops[1]);
            }
            i.a.width = 8;
            i.a.konst = module_.constant(address, 8);
        } else {
            i.a = source(ops[1], width);
        }
        i.fn = width == 2 ? static_cast<Handler>(move<u16>) : width == 4 ? static_cast<Handler>(move<u32>) : static_cast<Handler>(move<u64>);
    }

    void call_statement(Ins& i, const std::vector<string>& ops)
    {
        size_t k = 0;
        if (ops[0][0] == '(') {
            const string name = trim(ops[0].substr(1, ops[0].size() - 2));
            const Parameter* p = local_param(name);
            if (p == nullptr) error("no place for a result: " + name);
            i.result = p->offset;
            ++k;
        }
        i.callee = &function_named(ops[k++]);
        if (k < ops.size()) {
            for (const string& name : split(std::string_view(ops[k]).substr(1, ops[k].size() - 2))) {
                const Parameter* p = local_param(name);
                if (p == nullptr) error("no parameter of a call: " + name);
                i.arguments.push_back(p->offset);
            }
        }
        i.fn = call;
    }

    void instruction(const string& statement)
    {
        if (function_ == nullptr) error("an instruction outside of functions: " + statement);
        Ins i;
        i.line = line_;
        i.text = statement;
        std::replace_if(i.text.begin(), i.text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
        string s = statement;
        if (s[0] == '@') {
            size_t k = 1;
            i.guard_not = s[k] == '!';
            k += i.guard_not;
            size_t e = k;
            while (!std::isspace(static_cast<unsigned char>(s[e]))) ++e;
            i.guard = static_cast<int>(reg(s.substr(k, e - k), 1).off);
            i.c = reg(s.substr(k, e - k), 1);
            s = trim(std::string_view(s).substr(e));
        }
        size_t e = 0;
        while (e < s.size() && !std::isspace(static_cast<unsigned char>(s[e]))) ++e;
        const string mnemonic = s.substr(0, e);
        const std::vector<string> ops = split(std::string_view(s).substr(e));
        if (i.guard >= 0 && mnemonic != "bra") error("a predicated instruction other than a branch: " + s);
        if (mnemonic == "bra" || mnemonic == "bra.uni") {
            fixups_.emplace_back(function_->code.size(), ops.at(0));
            i.fn = branch;
        } else if (mnemonic == "call.uni") {
            call_statement(i, ops);
        } else if (mnemonic.compare(0, 3, "ld.") == 0 || mnemonic.compare(0, 3, "st.") == 0) {
            memory(i, mnemonic, ops, mnemonic[0] == 's');
        } else if (mnemonic.compare(0, 4, "mov.") == 0) {
            mov(i, mnemonic, ops);
        } else if (mnemonic.compare(0, 5, "atom.") == 0) {
            if (ops.size() != 3) error("operands");
            const bool wide = mnemonic.ends_with("u64");
            i.size = wide ? 8 : 4;
            i.strong = true;
            i.acquire = mnemonic == "atom.acq_rel.gpu.global.add.u32";
            i.release = i.acquire || mnemonic == "atom.add.release.gpu.u32";
            if (i.release || mnemonic == "atom.add.u32") {
                i.fn = atomic<u32, [](u32 a, u32 b) { return a + b; }>;
            } else if (mnemonic == "atom.max.u64" || mnemonic == "atom.global.max.u64") {
                i.fn = atomic<u64, [](u64 a, u64 b) { return (a > b ? a : b); }>;
            } else {
                error("unknown: " + mnemonic);
            }
            i.d = reg(ops[0], i.size);
            address(i, ops[1], false);
            i.b = source(ops[2], i.size);
        } else if (mnemonic == "prefetch.global.L2") {
            address(i, ops.at(0), false);
            i.fn = prefetch;
        } else if (mnemonic == "shfl.sync.down.b32" || mnemonic == "shfl.sync.idx.b32") {
            if (ops.size() != 5) error("operands");
            const size_t bar = ops[0].find('|');
            i.d = reg(ops[0].substr(0, bar), 4);
            if (bar != string::npos) i.d2 = reg(ops[0].substr(bar + 1), 1);
            i.a = source(ops[1], 4);
            i.b = source(ops[2], 4);
            i.c = source(ops[3], 4);
            i.e = source(ops[4], 4);
            i.fn = mnemonic == "shfl.sync.down.b32" ? static_cast<Handler>(shuffle<true>) : static_cast<Handler>(shuffle<false>);
        } else {
            const auto found = specs().find(mnemonic);
            if (found == specs().end()) error("unknown opcode: " + statement);
            const Spec& spec = found->second;
            i.fn = spec.fn;
            if (mnemonic.compare(0, 5, "cvta.") == 0) {
                i.count = mnemonic == "cvta.shared.u64" ? 0 : mnemonic == "cvta.to.shared.u64" ? 1 : mnemonic == "cvta.param.u64" ? 2 : 3;
            }
            size_t k = 0;
            if (spec.widths[0] != 0) i.d = reg(ops.at(k++), spec.widths[0]);
            Op* sources[] = {&i.a, &i.b, &i.c, &i.e};
            size_t n = 0;
            for (size_t q = 1; q < spec.widths.size(); ++q) {
                if (spec.widths[q] == -1) {
                    if (ops.at(k++) != "0") error("a barrier other than 0");
                    continue;
                }
                *sources[n++] = spec.widths[q] == 1 ? reg(ops.at(k++), 1) : source(ops.at(k++), spec.widths[q]);
            }
            if (k != ops.size()) error("operands: " + statement);
        }
        function_->code.push_back(std::move(i));
    }

    Module& module_;
    string text_;
    size_t at_ = 0;
    u32 line_ = 1, line_after_ = 0;
    Function* function_ = nullptr;
    std::vector<Scope> scopes_;
    std::unordered_map<string, u32> labels_;
    std::vector<std::pair<size_t, string>> fixups_;
};

// ---- running

std::mutex running;
std::vector<std::shared_ptr<Module>> modules;

std::shared_ptr<Module> load(const char* image)
{
    const std::lock_guard lock(running);
    static std::map<string, std::shared_ptr<Module>> known;
    auto& module = known[image];
    if (module == nullptr) {
        module = std::make_shared<Module>();
        Parser(*module, image).parse();
        for (auto& [name, f] : module->functions) {
            for (const Ins& i : f->code) {
                if (i.callee != nullptr && i.arguments.size() != i.callee->parameters.size()) fail("%s: arguments", name.c_str());
            }
        }
        modules.push_back(module);
    }
    return module;
}

bool has_kernel(const Module& module, const char* name)
{
    const auto f = module.functions.find(name);
    return f != module.functions.end() && f->second->entry;
}

std::vector<size_t> parameter_sizes(const Module& module, const char* name)
{
    std::vector<size_t> sizes;
    for (const Parameter& p : module.functions.at(name)->parameters) sizes.push_back(p.size);
    return sizes;
}

// Registers of a chain of calls, at most.
size_t deepest(const Function& f)
{
    size_t most = 0;
    for (const Ins& i : f.code) {
        if (i.callee != nullptr) most = std::max(most, deepest(*i.callee));
    }
    return f.frame + most;
}

void advance(Warp& w, u64 steps)
{
    while (steps-- > 0) {
        Frame& f = *w.top;
        if (f.pc >= f.next_pc || (independent && !f.groups.empty() && !f.released && lane_order() % 8 == 0)) regroup(w, f);
        const Ins& i = f.function->code[f.pc];
        ++f.pc;
        ++i.executed;
        w.mask = f.mask;
        if (i.guard >= 0) {
            need(w, i, i.c);
            w.mask &= i.guard_not ? ~w.preds[i.guard] : w.preds[i.guard];
        }
        i.fn(w, i);
        if (w.state != State::run) return;
    }
}

void run(Module& module, const Launch& launch)
{
    const std::lock_guard lock(running);
    fenv_t environment;
    fegetenv(&environment);
    // The caller's thread may flush subnormals or round otherwise.
    fesetenv(FE_DFL_ENV);
#if defined(__x86_64__)
    const unsigned mxcsr = _mm_getcsr();
    _mm_setcsr(0x1F80);
#endif
    Run run;
    run.module = &module;
    run.launch = &launch;
    run.function = module.functions.at(launch.kernel).get();
    Function& function = *run.function;
    if (launch.block % LANES != 0) fail("a block of %u threads", launch.block);
    run.parameters.assign(function.parameter_bytes, 0);
    for (size_t k = 0; k < function.parameters.size(); ++k) {
        std::memcpy(&run.parameters[function.parameters[k].offset], launch.parameters[k], function.parameters[k].size);
    }
    run.memory = launch.memory;
    alignas(64) u8 workspace[WORKSPACE] = {};
    run.workspace = 0;
    if (launch.cooperative) {
        run.workspace = reinterpret_cast<u64>(workspace);
        run.memory.push_back({run.workspace, run.workspace + WORKSPACE, nullptr, false});
        std::sort(run.memory.begin(), run.memory.end(), [](const Allocation& a, const Allocation& b) { return a.begin < b.begin; });
    }
    for (auto& [name, f] : module.functions) {
        for (const Ins& i : f->code) i.hint = 0;
    }
    ++function.launches;
    function.cooperative += launch.cooperative;
    ++function.grids[launch.grid];

    std::mt19937_64 random(launch.seed * 0x9E3779B97F4A7C15ull + 1);
    lane_order.seed(static_cast<u32>(launch.seed));
    const u32 warps = launch.block / LANES;
    // All blocks of a cooperative launch are there at once; of another one as many as chance says.
    const u32 resident = launch.cooperative ? launch.grid : 1 + static_cast<u32>(random() % std::min(launch.grid, 8u));
    const size_t arena = deepest(function) + 4096;
    std::vector<u32> order(launch.grid);
    for (u32 k = 0; k < launch.grid; ++k) order[k] = k;
    if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
    races.begin(launch.grid * warps, warps);
    static std::vector<std::unique_ptr<Block>> blocks;
    while (blocks.size() < resident) blocks.push_back(std::make_unique<Block>());
    u32 next = 0;
    const auto start = [&](Block& b, u32 index) {
        b.run = &run;
        b.index = index;
        b.shared.assign(module.shared_size, 0xFF);
        b.local.assign(module.local_size * launch.block, 0xFF);
        b.shared_init.assign(module.shared_size, 0);
        b.warps.resize(warps);
        b.arrived = 0;
        b.running = warps;
        for (u32 k = 0; k < warps; ++k) {
            Warp& w = b.warps[k];
            w.block = &b;
            w.index = k;
            w.live = ~0u;
            w.state = State::run;
            if (w.arena.size() < arena) w.arena.resize(arena);
            w.used = (64 - reinterpret_cast<uintptr_t>(w.arena.data()) % 64) % 64;
            w.depth = 0;
            w.waiting = nullptr;
            w.global_index = index * warps + k;
            w.sync = 0;
            enter(w, function, ~0u, nullptr);
        }
        races.block_begins(b);
    };
    std::vector<Block*> active;
    for (u32 k = 0; k < resident; ++k) {
        start(*blocks[k], order[next++]);
        active.push_back(blocks[k].get());
    }
    // How long a warp goes on: a few instructions, many, or until it waits.
    const u64 longest = std::array<u64, 4>{40, 700, 5000, 200000}[random() % 4];
    std::vector<Warp*> ready;
    while (!active.empty()) {
        ready.clear();
        for (Block* b : active) {
            for (Warp& w : b->warps) {
                if (w.state == State::run) ready.push_back(&w);
            }
        }
        if (ready.empty()) fault(active[0]->warps[0], *active[0]->warps[0].waiting, "a deadlock: nothing can run");
        // A turn for each that can run, in random order.
        std::shuffle(ready.begin(), ready.end(), random);
        for (Warp* w : ready) {
            const u64 steps = 1 + random() % longest;
            run.instructions += steps;
            advance(*w, steps);
            Block& b = *w->block;
            if (b.arrived == warps) release(b);
        }
        if (run.instructions > 40'000'000'000ull) fault(*ready[0], ready[0]->top->function->code[0], "no end in sight");
        for (size_t k = 0; k < active.size();) {
            if (active[k]->running == 0) {
                if (next < launch.grid) {
                    start(*active[k], order[next++]);
                    ++k;
                } else {
                    active.erase(active.begin() + static_cast<long>(k));
                }
            } else {
                if (active[k]->running < warps && active[k]->arrived > 0 && active[k]->arrived == active[k]->running) {
                    fault(active[k]->warps[0], active[k]->warps[0].top->function->code[0], "a barrier that some warps have left the kernel without");
                }
                ++k;
            }
        }
    }
    if (launch.cooperative) {
        // The barrier leaves the counter as it found it but for the bit that flips.
        u32 counter;
        std::memcpy(&counter, workspace + 4, 4);
        if ((counter & 0x7FFFFFFF) != 0) fail("%s: the grid barrier was left in the middle: %x", launch.kernel, counter);
    }
    races.end();
#if defined(__x86_64__)
    _mm_setcsr(mxcsr);
#endif
    fesetenv(&environment);
}

void write_report(const char* file)
{
    const std::lock_guard lock(running);
    std::FILE* out = std::fopen(file, "w");
    if (out == nullptr) return;
    for (const auto& module : modules) {
        for (const auto& [name, f] : module->functions) {
            u64 executed = 0;
            for (const Ins& i : f->code) executed += i.executed;
            std::fprintf(out, "function\t%s\t%d\t%llu\t%llu\t%llu\t%zu\n", name.c_str(), f->entry, (unsigned long long)f->launches,
                         (unsigned long long)f->cooperative, (unsigned long long)executed, f->code.size());
            for (const auto& [grid, count] : f->grids) {
                std::fprintf(out, "grid\t%s\t%u\t%llu\n", name.c_str(), grid, (unsigned long long)count);
            }
            for (const Ins& i : f->code) {
                std::fprintf(out, "line\t%s\t%u\t%llu\t%s\n", name.c_str(), i.line, (unsigned long long)i.executed, i.text.c_str());
                if (i.undefined != 0) std::fprintf(out, "undefined\t%s\t%u\t%llu\t%s\n", name.c_str(), i.line, (unsigned long long)i.undefined, i.text.c_str());
                if (i.uninitialised != 0) std::fprintf(out, "uninitialised\t%s\t%u\t%llu\t%s\n", name.c_str(), i.line, (unsigned long long)i.uninitialised, i.text.c_str());
            }
        }
    }
    races.report(out);
    std::fclose(out);
}

}  // namespace ptx
