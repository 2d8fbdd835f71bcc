"""Steps of rfdescent with its PTX in the emulator and on the CPU: parameters, states and reports, bit for bit.

python cases.py --library librfdescent.so --driver libcuda.so.1 [--seconds S] [--first SEED] [--cases N] [--kind KIND]...
"""

import argparse
import collections
import ctypes as ct
import json
import os
import sys
import time

import numpy as np

from rfd import (BF16, BITS, F16, F32, F64, NAMES, SIZE, Device, Library, Optimizer, Report, from_bits, is_nan, ptr, size_t,
                 to_bits, u64)  # fmt: skip

LENGTHS = [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 12289]
GRIDS = [1, 2, 3, 5, 7, 8] + ([13, 20] if int(os.environ.get("PTXEMU_BLOCKS", 8)) > 8 else [])
COVARIANCES = ["se", "rq:1", "rq:0.7", "rq:3", "matern:1.5", "matern:2.5"]
MASTERS, STOCHASTIC = 1, 2
NORM_LOCK, NOT_IN_NORM, SPLITS_ROWS = 1, 1, 2
OUTCOMES = ["none", "applied", "found_inf", "non_finite_loss", "non_finite_gradient", "zero_gradient", "invalid_option",
            "out_of_range", "loss_below_bound"]  # fmt: skip

# (parameters, gradients, flags, momentum, adaptive): what the lean kernels are for, and all else.
SHAPES = {
    "f32": (F32, F32, 0, 0.0, False),
    "f32_momentum": (F32, F32, 0, 0.9, False),
    "f32_averaged": (F32, F32, 0, 0.0, True),
    "bf16_master": (BF16, BF16, MASTERS, 0.0, False),
    "bf16_master_momentum": (BF16, BF16, MASTERS, 0.9, False),
    "bf16_master_averaged": (BF16, BF16, MASTERS, 0.0, True),
    "bf16": (BF16, BF16, 0, 0.0, False),
    "bf16_stochastic": (BF16, BF16, STOCHASTIC, 0.0, False),
    "f16_master": (F16, F16, MASTERS, 0.0, False),
    "f64": (F64, F64, 0, 0.0, False),
    "f64_momentum": (F64, F64, 0, 0.5, False),
    "f16": (F16, F16, 0, 0.0, False),
    "f16_stochastic": (F16, F16, STOCHASTIC, 0.9, False),
    "bf16_momentum_stochastic": (BF16, BF16, STOCHASTIC, 0.9, False),
    "f32_with_bf16": (F32, BF16, 0, 0.0, False),
    "mixed": (None, None, 0, None, False),
    "mixed_masters": (None, None, MASTERS, None, False),
    "mixed_stochastic": (None, None, STOCHASTIC, None, False),
    "mixed_adaptive": (None, None, None, 0.0, True),
    "f64_adaptive": (F64, F64, 0, 0.0, True),
    "f16_adaptive": (F16, F16, None, 0.0, True),
    "f32_adaptive_alone": (F32, F32, 0, 0.0, True),
    "f32_some_momentum": (F32, F32, 0, None, False),
    "bf16_master_some_momentum": (BF16, BF16, MASTERS, None, False),
    "conservative": (F32, F32, 0, None, False),
    "conservative_mixed": (None, None, None, None, False),
}


def pick(random, values):
    return values[int(random.integers(len(values)))]


def chance(random, p):
    return bool(random.random() < p)


def shape_of(random, n):
    """One dimension, or two where the length has a divisor that serves."""
    divisors = [d for d in (2, 3, 5, 7, 16, 31, 32, 64, 100, 128, 205, 683) if n > 0 and n % d == 0]
    return [n] if not divisors or chance(random, 0.3) else [(d := pick(random, divisors)), n // d]


def make_case(random, name, lengths, adaptive_steps):
    param, grad, flags, momentum, adaptive = SHAPES[name]
    lean = param is not None
    groups = []
    for _ in range(pick(random, [1, 1, 2, 3])):
        groups.append({
            "length_scale_factor": pick(random, [1.0, 1.0, 0.5, 3.0, 1e-3]),
            "multiplier": pick(random, [1.0, 1.0, 0.1, 0.0]),
            "momentum": momentum if momentum is not None else pick(random, [0.0, 0.5, 0.95]),
            "weight_decay": pick(random, [0.0, 0.0, 0.01, 0.3, 1e9]),
            "flags": NORM_LOCK if chance(random, 0.05 if lean else 0.3) else 0,
        })  # fmt: skip
    dtypes = [F32, F64, F16, BF16]
    specs = [{
        "len": n,
        "shape": shape_of(random, n) if adaptive else [n],
        # Rows of tensors with one dimension, for the adaptive method.
        "row": pick(random, [0, 0, 0, 3, 40]) if adaptive else 0,
        "dtype": param if lean else pick(random, dtypes),
        "group": int(random.integers(len(groups))),
        "flags": NOT_IN_NORM if chance(random, 0.15) else 0,
        "offset": pick(random, [0, 0, 3, 8, (1 << 33) + 5]),
    } for n in lengths]  # fmt: skip
    if flags is None:
        flags = pick(random, [0, MASTERS, STOCHASTIC, MASTERS + STOCHASTIC])
    options = {
        "multiplier": pick(random, [1.0, 1.0, 0.3]),
        "max_step_size": pick(random, [float("inf"), float("inf"), 1e-3, 0.05]),
        "seed": int(random.integers(1 << 63)),
        "flags": flags,
    }
    case = {"groups": groups, "specs": specs, "options": options, "adaptive": None, "name": name}
    case["grads"] = [grad if grad is not None else pick(random, dtypes) for _ in lengths]
    if adaptive:
        averaging = 0.0 if name == "f32_adaptive_alone" else pick(random, [0.9, 0.9, 0.5] + ([] if lean else [0.0]))
        case["adaptive"] = {"averaging": averaging, "loss_bound": pick(random, [0.0, 0.0, 0.1, -4.0])}
        for spec in specs:
            spec["row"] = min(spec["row"], spec["len"]) if len(spec["shape"]) == 1 else 0
        case["steps"] = adaptive_steps
    else:
        case["fitted"] = {"inv_batch_size": pick(random, [0.0, 1.0, 1 / 128]), "mode": pick(random, [0, 0, 1, 2])}
        case["covariance"] = pick(random, COVARIANCES)
        case["moments"] = {"mean": 2.5, "variance": 0.5, "noise_variance": 0.9, "grad_variance": 4.0,
                           "noise_grad_variance": 200.0, "dims": 500}  # fmt: skip
        case["steps"] = int(random.integers(2, 5))
        if name.startswith("conservative"):
            case["fitted"] |= {"conservatism": pick(random, [0.1, 0.5, 0.9]), "mode": 0}
            case["covariance"] = pick(random, COVARIANCES + ["rq:0.2", "rq:0.05"])
            options["flags"] &= ~STOCHASTIC
    return case


def make_parts(random, case):
    """Makes tensors parts: second halves, along one dimension, of whole ones. Ranks hold the others."""
    for group in case["groups"]:
        group["flags"] = 0
    for spec in case["specs"]:
        spec["row"] = spec["row"] if spec["row"] and spec["len"] % spec["row"] == 0 else 0
        behind = len(spec["shape"]) > 1 and spec["shape"][1] <= 4096 and chance(random, 0.5)
        spec["flags"] = SPLITS_ROWS if behind else 0
        spec["whole"] = [2 * size if dim == behind else size for dim, size in enumerate(spec["shape"])]
        spec["start"] = [size if dim == behind else 0 for dim, size in enumerate(spec["shape"])]


def compare_sums(device, cpu, count):
    for k in range(count):
        if not (cpu[k] == device[k] or (cpu[k] != cpu[k] and device[k] != device[k])):
            raise Different(f"sums of ranks: number {k} of {count} is {device[k]!r} by PTX, {cpu[k]!r} on the CPU")


def special(random, values, dtype, finite, dense=False):
    """Puts numbers at the edges of a format at odd places, or at half of all."""
    bits = to_bits(values, dtype).copy()
    if len(bits) == 0:
        return bits
    width = 8 * SIZE[dtype]
    fraction = {F32: 23, F64: 52, F16: 10, BF16: 7}[dtype]
    infinity = ((1 << (width - 1)) - 1) >> fraction << fraction
    sign = 1 << (width - 1)
    edges = [0, sign, 1, sign | 1, (1 << fraction) - 1, 1 << fraction, sign | (1 << fraction), 3]
    edges += [infinity - 1, sign | (infinity - 1), infinity - (1 << fraction), ((1 << (width - 2)) - 1) >> fraction << fraction]
    if not finite:
        edges += [infinity, sign | infinity, infinity | (1 << (fraction - 1)), infinity | 1, sign | infinity | 5]
    places = {0, len(bits) - 1, len(bits) // 2, 1 % len(bits)} | set(random.integers(len(bits), size=12).tolist())
    if dense:
        at = random.random(len(bits)) < 0.5
        bits[at] = np.array(edges, dtype=bits.dtype)[random.integers(len(edges), size=int(at.sum()))]
        return bits
    for at in places:
        if chance(random, 0.7):
            bits[at] = pick(random, edges)
    return bits


def make_grads(random, case, step):
    scale = pick(random, [1.0, 1.0, 1.0, 1e-4, 1e3, 1e25, 1e-30, 1e-40])
    extreme = pick(random, [1.0, 1.0, 1.0, 1e160, 1e-170, 1e306, 1e-308, 0.0])
    if case["adaptive"] is not None:
        scale, extreme = (scale, extreme) if chance(random, 0.1) else (pick(random, [1.0, 0.3, 2.0]), 1.0)
    # Some lists have f64 gradients whose squares overflow beside others of usual size.
    apart = case["name"].startswith(("mixed", "f64")) and chance(random, 0.25)
    zero, edges, spoil = chance(random, 0.06), chance(random, 0.15), chance(random, 0.08)
    grads, present = [], []
    for k, spec in enumerate(case["specs"]):
        dtype, n = case["grads"][k], spec["len"]
        most = pick(random, [1.0, 1.0, 1e160, 1e-170]) if apart else extreme
        s = scale * (most if dtype == F64 else 1.0) * ([1.0, 0.03, 4.0, 0.25][k % 4] if case["adaptive"] is not None else 1.0)
        values = np.zeros(n) if zero else np.clip(random.standard_normal(n), -4, 4) * s
        with np.errstate(all="ignore"):
            if dtype == F16:
                values = np.clip(values, -65000, 65000)
            elif dtype in (F32, BF16):
                values = np.clip(values, -3e38, 3e38)
        bits = special(random, values, dtype, True) if edges and not zero else to_bits(values, dtype).copy()
        grads.append(bits)
        present.append(n == 0 or not chance(random, 0.08))
    if spoil and any(len(g) for g in grads):
        k = pick(random, [k for k, g in enumerate(grads) if len(g)])
        at = pick(random, [0, len(grads[k]) - 1, len(grads[k]) // 2, int(random.integers(len(grads[k])))])
        grads[k][at] = to_bits([pick(random, [np.nan, np.inf, -np.inf])], case["grads"][k])[0]
    return grads, present


def loss_of(random, case, step):
    if case["adaptive"] is None:
        return pick(random, [2.0, 2.4, 2.5, 2.6, 0.1, -3.0, 1e30, float("nan"), float("inf"), 2.3, 1.9, 2.1])
    if chance(random, 0.04):
        return pick(random, [float("nan"), -5.0, float("inf"), 1e200])
    trend = [2.0 - 0.02 * step, 1.0 + 0.03 * step, 1.5][step // 30 % 3]
    return trend * (1.0 + 0.1 * float(random.standard_normal()))


class Different(Exception):
    pass


payloads = collections.Counter()


def compare_bits(a, b, dtype, what):
    """The same bits; NaN may be another NaN, which is counted."""
    different = a != b
    if not different.any():
        return
    nan = is_nan(a, dtype) & is_nan(b, dtype)
    payloads[what.split(" ")[0]] += int((different & nan).sum())
    different &= ~nan
    if different.any():
        at = int(np.flatnonzero(different)[0])
        raise Different(f"{what}[{at}] of {len(a)}: PTX {a[at]:#x} ({from_bits(a[at:at+1], dtype)[0]!r}), CPU {b[at]:#x} "
                        f"({from_bits(b[at:at+1], dtype)[0]!r}); {int(different.sum())} differ")  # fmt: skip


def close(a, b):
    return a == b or (a != a and b != b) or abs(a - b) <= 1e-9 * max(abs(a), abs(b))


def compare_reports(device, cpu, conservative):
    if not conservative:
        if device.bits() != cpu.bits():
            raise Different(f"reports: PTX {device}; CPU {cpu}")
        return
    same = (device.outcome, device.applied_steps, device.skipped_steps) == (cpu.outcome, cpu.applied_steps, cpu.skipped_steps)
    if not same or not all(close(getattr(device, n), getattr(cpu, n)) for n in Report.NUMBERS):
        raise Different(f"reports: PTX {device}; CPU {cpu}")


def compare_states(device, cpu, params, case):
    """As tests/device.rs: what one of both lacks is at rest in the other."""
    (a, meta_a, _), (b, meta_b, _) = device, cpu
    # Which of a device's two sides holds the variances.
    for about in (meta_a, meta_b):
        for tensor in about["tensors"]:
            tensor.get("history", {}).pop("turn", None)
    if meta_a != meta_b:
        raise Different(f"states: PTX {meta_a}; CPU {meta_b}")
    for name in a.keys() | b.keys():
        if name in a and name in b:
            dtype = F64 if a[name].dtype == np.uint64 else F32
            compare_bits(a[name], b[name], dtype, f"state {name}")
        else:
            one = a.get(name, b.get(name))
            if name.startswith("master."):
                k = int(name.rsplit("t", 1)[1])
                with np.errstate(all="ignore"):
                    wide = from_bits(params[k], case["specs"][k]["dtype"]).astype(np.float32).view(np.uint32)
                compare_bits(one, wide, F32, f"state {name}")
            elif one.any():
                raise Different(f"state {name} is not at rest")


def run_case(library, seed, kind, outcomes, verbose=False):
    random = np.random.default_rng([seed, sum(map(ord, kind))])
    name, _, size = kind.partition("/")
    if size == "many":
        lengths = [int(random.integers(0, 9)) for _ in range(int(random.integers(300, 1000)))]
    elif size == "long":
        lengths = [pick(random, LENGTHS), 256 * 4096 + pick(random, [-1, 0, 1, 4096, 5003]), 4096]
        if chance(random, 0.5):
            lengths.insert(1, 2 * 256 * 4096 + 17)
    elif size == "tiny":
        lengths = [pick(random, [0, 1, 2, 3, 5]) for _ in range(int(random.integers(0, 4)))]
    else:
        lengths = [pick(random, LENGTHS) for _ in range(int(random.integers(1, 9)))]
    steps = int(random.integers(3, 9)) if size in ("many", "long") else int(random.integers(20, 70))
    case = make_case(random, name, lengths, steps)
    parts = size == "parts"
    if parts:
        make_parts(random, case)
    conservative = name.startswith("conservative")
    adaptive = case["adaptive"] is not None
    n = len(lengths)
    # Parameters, some at the edges.
    edges = chance(random, 0.3) or size == "edges"
    scale = pick(random, [1.0, 1.0, 1e-3, 100.0])
    params = []
    for spec in case["specs"]:
        values = random.standard_normal(spec["len"]) * scale
        params.append(special(random, values, spec["dtype"], False, size == "edges") if edges else to_bits(values, spec["dtype"]).copy())
    aligned = chance(random, 0.4)
    shift = lambda dtype: 0 if aligned else int(random.integers(0, 16 // SIZE[dtype] + 1))  # noqa: E731
    placed = [Device(library, p, shift(s["dtype"])) for p, s in zip(params, case["specs"])]
    dtypes = [s["dtype"] for s in case["specs"]]
    library.cuda.ptxemu_configure(8, 0)
    on_cpu, on_device = Optimizer(library, case, False), Optimizer(library, case, True)
    cpu_params = on_cpu.tensors([p.ctypes.data if p.size else 1 << 12 for p in params], lengths, dtypes)
    device_params = on_device.tensors([p.address for p in placed], lengths, dtypes)
    refuse = chance(random, 0.35)
    held = []
    locked = any(g["flags"] for g in case["groups"])

    def scalar(value, dtype):
        held.append(Device(library, to_bits([value], dtype), int(random.integers(0, 3))))
        return held[-1].address

    try:
        if chance(random, 0.3):
            on_device.call("init_master_weights", device_params, size_t(n), None)
            on_cpu.call("init_master_weights", cpu_params, size_t(n), None)
        for step in range(case["steps"]):
            library.cuda.ptxemu_configure(pick(random, GRIDS), int(refuse and step > 0))
            grads, present = make_grads(random, case, step)
            placed_grads = [Device(library, g, shift(d)) for g, d in zip(grads, case["grads"])]
            held.extend(placed_grads)
            # Gradients on the CPU at odd addresses too.
            addresses = [g.ctypes.data if p and g.size else (1 << 12 if p else None) for g, p in zip(grads, present)]
            cpu_grads = on_cpu.tensors(addresses, lengths, case["grads"])
            device_grads = on_device.tensors([g.address if p else None for g, p in zip(placed_grads, present)], lengths, case["grads"])
            loss_dtype = pick(random, [F32, F64, F16, BF16])
            with np.errstate(all="ignore"):
                loss = float(from_bits(to_bits([loss_of(random, case, step)], loss_dtype), loss_dtype)[0])
            grad_scale = pick(random, [None, None, 1.0, 1024.0, 3.0, 2.0**-100]) if not adaptive or chance(random, 0.3) else None
            found_inf = pick(random, [None, None, None, 0.0, -0.0, 2.0, float("nan")] + [0.0] * 4)
            cpu_input = on_cpu.input(loss=loss, grad_scale=1.0 if grad_scale is None else grad_scale,
                                     found_inf=0.0 if found_inf is None else found_inf)  # fmt: skip
            fields = {}
            if chance(random, 0.5):
                fields["loss"] = loss
            else:
                fields.update(loss_address=scalar(loss, loss_dtype), loss_dtype=loss_dtype)
            if grad_scale is not None:
                fields["grad_scale_address"] = scalar(grad_scale, F32)
            if found_inf is not None:
                fields["found_inf_address"] = scalar(found_inf, F32)
            device_input = on_device.input(**fields)
            cpu_report, report = Report(), Report()
            before = [p.copy() for p in params]
            if parts or (not locked and not adaptive and chance(random, 0.2)):
                sums, device_sums = ct.POINTER(ct.c_double)(), ct.POINTER(ct.c_double)()
                on_cpu.call("local_sums", cpu_params, cpu_grads, size_t(n), ct.byref(cpu_input), None, ct.byref(sums))
                on_device.call("local_sums", device_params, device_grads, size_t(n), ct.byref(device_input), None, ct.byref(device_sums))
                count = size_t()
                on_cpu.call("sums_len", ct.byref(count))
                compare_sums(device_sums, sums, count.value)
                for k in range(count.value if parts else 0):
                    # The other half of each tensor is like this one.
                    sums[k] = device_sums[k] = 2 * sums[k]
                on_cpu.call("step_with_sums", cpu_params, cpu_grads, size_t(n), sums, ct.byref(cpu_input), None, ct.byref(cpu_report))
                on_device.call("step_with_sums", device_params, device_grads, size_t(n), device_sums, ct.byref(device_input), None, None)
            else:
                on_cpu.call("step", cpu_params, cpu_grads, size_t(n), ct.byref(cpu_input), None, ct.byref(cpu_report))
                on_device.call("step", device_params, device_grads, size_t(n), ct.byref(device_input), None, None)
            on_device.call("wait_report", None, ct.byref(report))
            compare_reports(report, cpu_report, conservative)
            outcomes[OUTCOMES[report.outcome]] += 1
            for k in range(n):
                found = placed[k].read()
                if not conservative:
                    compare_bits(found, params[k], dtypes[k], f"params {NAMES[dtypes[k]]}/{NAMES[case['grads'][k]]} tensor {k}")
                elif not edges:
                    a, b, c = (from_bits(x, dtypes[k]).astype(np.float64) for x in (found, params[k], before[k]))
                    # What moved differs by 1e-9, which may move the result to a neighbour in its format.
                    moved = np.abs(b - c)
                    unit = 2.0 ** -{F32: 23, F64: 23, F16: 10, BF16: 7}[dtypes[k]]
                    bound = 2e-9 * moved + 4 * 2.0**-24 * (moved + np.abs(c)) + 2 * unit * np.abs(b) + {F16: 2.0**-24}.get(dtypes[k], 1e-38)
                    if not (np.abs(a - b) <= bound).all():
                        raise Different(f"params {NAMES[dtypes[k]]} tensor {k}: {np.abs(a - b).max()}")
                if conservative:
                    # From the same numbers on.
                    params[k][:] = found
            for d in placed_grads[: len(placed_grads) // 2]:
                held.remove(d)
                d.free()
            # Settings that change between steps.
            if chance(random, 0.15):
                for o in (on_cpu, on_device):
                    o.call("set_multiplier", ct.c_double(0.5), None)
            if chance(random, 0.1):
                for o in (on_cpu, on_device):
                    o.call("set_weight_decay", size_t(0), ct.c_double(0.02), None)
            if chance(random, 0.1) and not adaptive:
                for o in (on_cpu, on_device):
                    o.call("set_fitted", ct.byref(o.fitted(case["fitted"] | {"inv_batch_size": 1 / 64})), None)
            if not conservative and chance(random, 0.08 if adaptive else 0.3):
                a, b = on_device.state(), on_cpu.state()
                compare_states(a, b, params, case)
                if chance(random, 0.5):
                    # The device goes on from the CPU's state.
                    buffer = ct.create_string_buffer(b[2], len(b[2]))
                    on_device.call("set_state", ptr(ct.addressof(buffer)), size_t(len(b[2])), None)
        if not conservative:
            compare_states(on_device.state(), on_cpu.state(), params, case)
    finally:
        on_cpu.destroy()
        on_device.destroy()
        for d in placed + held:
            d.free()
    return case["steps"]


def invalid_settings(library):
    """A gradient scale that is none, which only a device can meet: the step is skipped and nothing changes."""
    for name in ("f32", "f32_averaged", "bf16_master_momentum", "mixed"):
        for cooperative in (True, False):
            for scale in (0.0, -1.0, float("nan"), float("inf"), -0.0):
                random = np.random.default_rng(7)
                case = make_case(random, name, [300, 4097], 3)
                bits = [to_bits(random.standard_normal(s["len"]), s["dtype"]) for s in case["specs"]]
                params = [Device(library, b, 1) for b in bits]
                grads = [Device(library, to_bits(random.standard_normal(s["len"]), d), 1) for s, d in zip(case["specs"], case["grads"])]
                o, held = Optimizer(library, case, True), Device(library, to_bits([scale], F32), 0)
                library.cuda.ptxemu_configure(3, int(not cooperative))
                p = o.tensors([p.address for p in params], [300, 4097], [s["dtype"] for s in case["specs"]])
                g = o.tensors([p.address for p in grads], [300, 4097], case["grads"])
                o.call("step", p, g, size_t(2), ct.byref(o.input(loss=2.0, grad_scale_address=held.address)), None, None)
                report = Report()
                o.call("wait_report", None, ct.byref(report))
                if (OUTCOMES[report.outcome], report.applied_steps, report.skipped_steps) != ("invalid_option", 0, 1):
                    raise Different(f"grad_scale {scale}, {name}: {report}")
                if not all((p.read() == b).all() for p, b in zip(params, bits)):
                    raise Different(f"grad_scale {scale}, {name}: parameters changed")
                o.destroy()
                for d in params + grads + [held]:
                    d.free()


def kinds():
    result = list(SHAPES)
    for name in ("f32", "f32_momentum", "f32_averaged", "bf16_master_momentum", "bf16_master_averaged", "bf16_stochastic",
                 "f16_master", "mixed", "mixed_masters", "mixed_adaptive", "conservative"):  # fmt: skip
        result += [name + "/many", name + "/long"]
    for name in ("f32", "bf16", "bf16_stochastic", "f16_stochastic", "bf16_master_momentum", "f16_master", "mixed_stochastic", "mixed_masters",
                 "f64_momentum"):  # fmt: skip
        result.append(name + "/edges")
    result += [name + "/parts" for name, (*_, adaptive) in SHAPES.items() if adaptive]
    return result + ["mixed/tiny", "f32/tiny", "mixed_adaptive/tiny"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--keep-going", action="store_true")
    a = parser.parse_args()
    library = Library(a.library, a.driver)
    start, done, steps, failures = time.time(), 0, 0, 0
    outcomes = collections.Counter()
    if a.kind is None:
        invalid_settings(library)
    seed = a.first
    while time.time() - start < a.seconds and seed < a.first + a.cases:
        for kind in a.kind or kinds():
            if time.time() - start > a.seconds:
                break
            try:
                steps += run_case(library, seed, kind, outcomes)
            except (Different, RuntimeError) as problem:
                failures += 1
                print(f"seed {seed}, {kind}: {type(problem).__name__}: {problem}", flush=True)
                if not a.keep_going:
                    sys.exit(1)
            done += 1
        seed += 1
    print(f"{done} cases, {steps} steps, {library.cuda.ptxemu_launches()} launches, {failures} failures, seeds {a.first} to {seed}, "
          f"{time.time() - start:.0f} s; outcomes {dict(outcomes)}; NaN of other bits {dict(payloads)}")  # fmt: skip
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
