"""The C interface of rfdescent by ctypes, and memory of the emulated driver."""

import ctypes as ct
import json
import struct

import numpy as np

F32, F64, F16, BF16 = 0, 1, 2, 3
SIZE = {F32: 4, F64: 8, F16: 2, BF16: 2}
BITS = {F32: np.uint32, F64: np.uint64, F16: np.uint16, BF16: np.uint16}
NAMES = {F32: "f32", F64: "f64", F16: "f16", BF16: "bf16"}

u64, u32, f64, size_t, ptr = ct.c_uint64, ct.c_uint32, ct.c_double, ct.c_size_t, ct.c_void_p


class Sized(ct.Structure):
    def __init__(self, **fields):
        super().__init__(**fields)
        self.size = ct.sizeof(self)


class Moments(Sized):
    _fields_ = [("size", size_t), ("mean", f64), ("variance", f64), ("noise_variance", f64), ("grad_variance", f64),
                ("noise_grad_variance", f64), ("dims", u64)]  # fmt: skip


class Group(Sized):
    _fields_ = [("size", size_t), ("length_scale_factor", f64), ("multiplier", f64), ("weight_decay", f64),
                ("flags", u32)]  # fmt: skip


class Options(Sized):
    _fields_ = [("size", size_t), ("groups", ct.POINTER(Group)), ("group_count", size_t), ("multiplier", f64),
                ("max_step_size", f64), ("seed", u64), ("flags", u32), ("device_kind", u32),
                ("device_index", u32)]  # fmt: skip


class Spec(Sized):
    _fields_ = [("size", size_t), ("name", ct.c_char_p), ("shape", ct.POINTER(u64)), ("offset", u64), ("rank", u32),
                ("dtype", u32), ("group", u32), ("flags", u32), ("row", u64), ("whole", ct.POINTER(u64)),
                ("start", ct.POINTER(u64))]  # fmt: skip


class Fitted(Sized):
    _fields_ = [("size", size_t), ("model", ptr), ("conservatism", f64), ("inv_batch_size", f64), ("momentum", f64),
                ("group_momentum", ct.POINTER(f64)), ("group_momentum_count", size_t), ("mode", u32)]  # fmt: skip


class Adaptive(Sized):
    _fields_ = [("size", size_t), ("averaging", f64), ("loss_bound", f64), ("reserved", u32)]


class Tensor(Sized):
    _fields_ = [("size", size_t), ("data", ptr), ("count", u64), ("dtype", u32), ("device_kind", u32),
                ("device_index", u32)]  # fmt: skip


class Input(Sized):
    _fields_ = [("size", size_t), ("loss", f64), ("grad_scale", f64), ("found_inf", f64), ("loss_address", ptr),
                ("grad_scale_address", ptr), ("found_inf_address", ptr), ("loss_dtype", u32)]  # fmt: skip


class Report(Sized):
    _fields_ = [("size", size_t), ("loss", f64), ("grad_norm", f64), ("sigma_norm", f64), ("theta", f64),
                ("step_size", f64), ("learning_rate", f64), ("applied_steps", u64), ("skipped_steps", u64),
                ("outcome", u32), ("limit", u32), ("trust", f64)]  # fmt: skip

    NUMBERS = ("loss", "grad_norm", "sigma_norm", "theta", "step_size", "learning_rate", "trust")

    def bits(self):
        """NaN is NaN."""
        numbers = [struct.pack("<d", getattr(self, name)) for name in self.NUMBERS]
        numbers = [b"nan" if x != x else b for b, x in zip(numbers, (getattr(self, n) for n in self.NUMBERS))]
        return numbers, self.applied_steps, self.skipped_steps, self.outcome, self.limit

    def __str__(self):
        return " ".join(f"{n}={getattr(self, n)!r}" for n, _ in self._fields_[1:])


class Library:
    def __init__(self, library, driver):
        self.cuda = ct.CDLL(driver, mode=ct.RTLD_GLOBAL)
        self.lib = ct.CDLL(library)
        self.lib.rfd_last_error.restype = ct.c_char_p
        self.lib.rfd_buffer_data.restype = ptr
        self.lib.rfd_buffer_size.restype = size_t
        self.cuda.ptxemu_allocate.restype = u64
        self.cuda.ptxemu_launches.restype = u64
        context = ptr()
        self.cu("cuInit", 0)
        self.cu("cuDevicePrimaryCtxRetain", ct.byref(context), 0)
        self.cu("cuCtxSetCurrent", context)

    def cu(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        assert status == 0, (name, status)

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {status}: {self.lib.rfd_last_error().decode()}")

    def upload(self, address, array):
        if array.nbytes > 0:
            array = np.ascontiguousarray(array)
            self.cu("cuMemcpyHtoDAsync_v2", u64(address), ptr(array.ctypes.data), size_t(array.nbytes), None)


class Device:
    """An array of bits in memory of the driver of exactly its size."""

    def __init__(self, library, bits, shift):
        self.library, self.dtype, self.shape = library, bits.dtype, bits.shape
        self.nbytes = bits.nbytes
        self.address = library.cuda.ptxemu_allocate(size_t(bits.nbytes), size_t(shift * bits.dtype.itemsize))
        self.write(bits)

    def write(self, bits):
        self.library.upload(self.address, bits)

    def read(self):
        return np.frombuffer(ct.string_at(self.address, self.nbytes), dtype=self.dtype).copy()

    def free(self):
        self.library.cu("cuMemFree_v2", u64(self.address))


def to_bits(values, dtype):
    """Rounds f64 to a format; bf16 by truncation, which is as good for tests."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        if dtype == F64:
            return values.view(np.uint64)
        if dtype == F32:
            return values.astype(np.float32).view(np.uint32)
        if dtype == F16:
            return values.astype(np.float16).view(np.uint16)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits, dtype):
    if dtype == F64:
        return bits.view(np.float64)
    if dtype == F32:
        return bits.view(np.float32)
    if dtype == F16:
        return bits.view(np.float16)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def is_nan(bits, dtype):
    return np.isnan(from_bits(bits, dtype))


class Optimizer:
    """`device` says where; `groups` and `specs` are lists of dicts."""

    def __init__(self, library, case, device):
        self.library, self.device, self.count = library, device, len(case["specs"])
        self.groups = case["groups"]
        options = Options()
        library.call("rfd_optimizer_options_init", ct.byref(options), size_t(ct.sizeof(options)))
        groups = (Group * len(self.groups))(*[self.group(g) for g in self.groups])
        options.groups, options.group_count = groups, len(groups)
        for name, value in case["options"].items():
            setattr(options, name, value)
        options.device_kind = 1 if device else 0
        keep, specs = [], (Spec * self.count)()
        for k, s in enumerate(case["specs"]):
            sizes = {name: (u64 * len(s["shape"]))(*s[name]) for name in ("shape", "whole", "start") if name in s}
            keep.append(sizes)
            specs[k] = Spec(name=f"t{k}".encode(), rank=len(s["shape"]), dtype=s["dtype"], group=s["group"],
                            flags=s["flags"], offset=s["offset"], row=s["row"], **sizes)  # fmt: skip
        self.handle = ptr()
        if case["adaptive"] is not None:
            adaptive = Adaptive()
            library.call("rfd_adaptive_init", ct.byref(adaptive), size_t(ct.sizeof(adaptive)))
            for name, value in case["adaptive"].items():
                setattr(adaptive, name, value)
            library.call("rfd_adaptive_optimizer_create", ct.byref(adaptive), ct.byref(options), specs, size_t(self.count),
                         ct.byref(self.handle))  # fmt: skip
        else:
            self.model = ptr()
            library.call("rfd_model_create", case["covariance"].encode(), ct.byref(Moments(**case["moments"])),
                         ct.byref(self.model))  # fmt: skip
            library.call("rfd_fitted_optimizer_create", ct.byref(self.fitted(case["fitted"])), ct.byref(options), specs,
                         size_t(self.count), ct.byref(self.handle))  # fmt: skip

    def group(self, settings):
        g = Group()
        self.library.call("rfd_group_init", ct.byref(g), size_t(ct.sizeof(g)))
        for name, value in settings.items():
            if name != "momentum":
                setattr(g, name, value)
        return g

    def fitted(self, settings):
        fitted = Fitted()
        self.library.call("rfd_fitted_init", ct.byref(fitted), size_t(ct.sizeof(fitted)))
        self.momenta = (f64 * len(self.groups))(*[g["momentum"] for g in self.groups])
        fitted.model, fitted.group_momentum, fitted.group_momentum_count = self.model, self.momenta, len(self.groups)
        for name, value in settings.items():
            setattr(fitted, name, value)
        return fitted

    def call(self, name, *arguments):
        self.library.call("rfd_optimizer_" + name, self.handle, *arguments)

    def tensors(self, addresses, lengths, dtypes):
        kind = 1 if self.device else 0
        return (Tensor * self.count)(
            *[Tensor(data=a, count=n, dtype=d, device_kind=kind) for a, n, d in zip(addresses, lengths, dtypes)]
        )

    def input(self, **fields):
        i = Input()
        self.library.call("rfd_step_input_init", ct.byref(i), size_t(ct.sizeof(i)))
        for name, value in fields.items():
            setattr(i, name, value)
        return i

    def state(self):
        """The tensors of a saved state, what its header says but for which buffers it has, and its bytes."""
        buffer = ptr()
        self.call("get_state", None, ct.byref(buffer))
        data = ct.string_at(self.library.lib.rfd_buffer_data(buffer), self.library.lib.rfd_buffer_size(buffer))
        self.library.lib.rfd_buffer_destroy(buffer)
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        about = json.loads(header.pop("__metadata__")["rfdescent_optimizer_state"])
        for tensor in about["tensors"]:
            del tensor["velocity"], tensor["master"]
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + size + x for x in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], dtype={"F32": np.uint32, "F64": np.uint64}[entry["dtype"]])
        return tensors, about, data

    def destroy(self):
        self.library.lib.rfd_optimizer_destroy(self.handle)
        if hasattr(self, "model"):
            self.library.lib.rfd_model_destroy(self.model)
