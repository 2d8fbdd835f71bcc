"""Steps of RFD on a CUDA driver whose one GPU is the kernels' CPU shim; run by test_cuda.py.

PyTorch knows nothing of that driver, so tensors are CPU tensors in the driver's memory that say they are on a
device.
"""

import contextlib
import ctypes
import math
import types
import warnings

import torch
import torch.distributed as dist

from rfdescent import RFD, AdaptiveRFD, SquaredExponential, sharded
from rfdescent._engine import TensorPlace, sums_len
from rfdescent._part import Part
from rfdescent.sharded import Reduction

driver = ctypes.CDLL("libcuda.so.1")
DEVICE = torch.device("cuda", 0)
COV = SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=500)
current = ctypes.c_void_p()


def cu(name, *arguments):
    assert getattr(driver, name)(*arguments) == 0, name


class OnDevice(torch.Tensor):
    @property
    def device(self):
        return DEVICE


def on_device(values):
    """A copy in memory of the driver."""
    address = ctypes.c_uint64()
    size = values.numel() * values.element_size()
    cu("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
    if size == 0:
        return values.clone().as_subclass(OnDevice)
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address.value), dtype=values.dtype)
    copy = memory.as_strided(values.shape, values.stride())
    copy.copy_(values)
    return copy.as_subclass(OnDevice)


def prepare():
    context = ctypes.c_void_p()
    cu("cuInit", 0)
    cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    cu("cuCtxSetCurrent", context)
    cu("cuStreamCreate", ctypes.byref(current), 0)
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=current.value)
    torch.cuda.is_current_stream_capturing = lambda: False


@contextlib.contextmanager
def captured():
    """Gives a function that replays what was queued inside."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    cu("cuStreamBeginCapture_v2", current, 0)
    torch.cuda.is_current_stream_capturing = lambda: True
    yield lambda: cu("cuGraphLaunch", executable, current)
    torch.cuda.is_current_stream_capturing = lambda: False
    cu("cuStreamEndCapture", current, ctypes.byref(graph))
    cu("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))


def published(params, **options):
    return RFD(params, covariance_model=COV, **options)


def make(options, method=published):
    """The same parameters on the CPU and on the device, and their optimizers."""
    torch.manual_seed(4)
    shapes = [
        ((30, 7), torch.float32),
        ((0,), torch.float32),
        ((17,), torch.bfloat16),
        ((2, 3, 4), torch.float64),
    ]
    here = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape, dtype in shapes]
    there = [on_device(p) for p in here]
    return [(params, method([p.requires_grad_() for p in params], **options)) for params in (here, there)]


def set_grads(here, there, scale=1.0):
    for p, q in zip(here, there, strict=True):
        p.grad = torch.randn_like(p) * scale
        if q.grad is None:
            q.grad = on_device(p.grad)
        else:
            q.grad.copy_(p.grad)


def check(here, there, cpu, device):
    """Bitwise the same."""
    a, b = cpu.report, device.wait_report()
    assert a == b, (a, b)
    for p, q in zip(here, there, strict=True):
        assert torch.equal(p, q.as_subclass(torch.Tensor))


def steps():
    for options in (
        {},
        {"momentum": 0.5, "weight_decay": 0.01, "master_weights": True},
        {"norm_lock": True, "b_size_inv": 0.01},
        {"stochastic_rounding": 3},
    ):
        (here, cpu), (there, device) = make(options)
        for k, dtype in enumerate([torch.float32, torch.float64, torch.float16, torch.bfloat16]):
            set_grads(here, there)
            loss = torch.tensor(2.5 - k / 8, dtype=dtype)
            cpu.step(loss=loss)
            device.step(loss=on_device(loss))
            check(here, there, cpu, device)
        # A number, another learning rate, a parameter without gradient.
        for optimizer, params in ((cpu, here), (device, there)):
            optimizer.param_groups[0]["lr"] = 0.25
            params[2].grad = None
            optimizer.step(loss=2.0)
        check(here, there, cpu, device)
        for params, name in ((here, "cpu"), (there, "device")):
            assert all(p.grad is None or p.grad.shape == p.shape for p in params), name


def scaled():
    (here, cpu), (there, device) = make({"momentum": 0.5})
    for found in (0.0, 1.0, 0.0):
        set_grads(here, there, scale=8.0)
        for optimizer, place in ((cpu, lambda x: x), (device, on_device)):
            optimizer.grad_scale, optimizer.found_inf = place(torch.tensor(8.0)), place(torch.tensor(found))
            optimizer.step(loss=place(torch.tensor(2.0)))
            del optimizer.grad_scale, optimizer.found_inf
        check(here, there, cpu, device)
    assert (device.report.applied_steps, device.report.skipped_steps) == (2, 1)


def graph():
    (here, cpu), (there, device) = make({"momentum": 0.5, "master_weights": True})
    loss = on_device(torch.tensor(2.5))
    set_grads(here, there)
    cpu.step(loss=2.5)
    device.step(loss=loss)
    with captured() as replay:
        device.step(loss=loss)
    for k in range(4):
        set_grads(here, there)
        loss.fill_(2.25 - k / 8)
        for optimizer in (cpu, device):
            optimizer.param_groups[0]["lr"] = 1 / (k + 1)
        # As a scheduler between replays.
        device.push_settings()
        cpu.step(loss=2.25 - k / 8)
        replay()
        check(here, there, cpu, device)
    _, (_, first) = make({})
    with captured():
        try:
            first.step(loss=loss)
            raise AssertionError
        except RuntimeError as error:
            assert "take one step before capturing" in str(error)
        first.found_inf = None


def several_processes(count, reduce):
    """Pretends that there are so many, whose sums `reduce` makes of those of this one."""
    empty = torch.empty
    torch.empty = lambda *size, device=None, **options: (
        on_device(empty(*size, **options)) if device == DEVICE else empty(*size, **options)
    )
    torch.as_tensor = lambda memory, device: from_address(memory.__cuda_array_interface__, device)
    dist.get_world_size = lambda group: count
    dist.all_reduce = lambda buffer, group: reduce(buffer)


def steps_in_halves(here, there, cpu, device, all_found):
    for found in all_found:
        set_grads(here, there)
        for optimizer, place in ((cpu, lambda x: x), (device, on_device)):
            if found is not None:
                optimizer.grad_scale, optimizer.found_inf = (
                    place(torch.tensor(8.0)),
                    place(torch.tensor(found)),
                )
            optimizer.step(loss=place(torch.tensor(2.25)))
            optimizer.grad_scale = optimizer.found_inf = None
        check(here, there, cpu, device)


def sharded_steps():
    """The split form, as of two processes that hold the same."""
    several_processes(2, lambda buffer: buffer.mul_(2))
    (here, cpu), (there, device) = make({"momentum": 0.5})
    for optimizer in (cpu, device):
        places = [TensorPlace(name, 0) for name in optimizer._names()]
        optimizer._reduction = Reduction(None, places, elements=251, same=False, count=2)
    steps_in_halves(here, there, cpu, device, (None, 0.0, 1.0, None))
    square = sum(float(p.grad.double().square().sum()) for p in here)
    assert math.isclose(device.report.grad_norm, math.sqrt(2 * square), rel_tol=1e-12)
    assert device.report.loss == 2.25
    assert (device.report.applied_steps, device.report.skipped_steps) == (3, 1)


def sharded_adaptive():
    """Parts of tensors that happen to be all of them: rows that processes share, and whole ones."""
    several_processes(1, lambda buffer: None)
    (here, cpu), (there, device) = make({"master_weights": True}, AdaptiveRFD)
    for optimizer, params in ((cpu, here), (device, there)):
        shapes = [tuple(p.shape) for p in params]
        parts = [Part(shape, (0,) * len(shape), shape == (30, 7)) for shape in shapes]
        places = [
            TensorPlace(name, 0, part=part) for name, part in zip(optimizer._names(), parts, strict=True)
        ]
        count = sums_len(*optimizer._options(), places, params)
        # Seven of each tensor, one of each column, two of each row that is shared, as vectors are.
        assert count == 4 * 7 + (7 + 12) + 2 * (30 + 1 + 1)
        optimizer._reduction = Reduction(None, places, elements=251, same=False, count=count)
    # What the optimizer takes from the parameters it takes in the second step: found_inf skips the first.
    steps_in_halves(here, there, cpu, device, (1.0, None, 0.0, 1.0, *[None] * 20))
    assert (device.report.applied_steps, device.report.skipped_steps) == (22, 2)
    a, b = cpu._engine.get_state(), device._engine.get_state()
    assert a.history.shared == b.history.shared
    for of_cpu, of_device in zip(a.history.variances, b.history.variances, strict=True):
        assert torch.equal(of_cpu.values, of_device.values)
    # As if another process had all of each tensor too, more than there is.
    dist.all_reduce = lambda buffer, group: buffer[sharded._SUMS :].mul_(2)
    before = [q.as_subclass(torch.Tensor).clone() for q in there]
    # No step raises: another process may not have seen the end of the same one yet.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(20):
            set_grads(here, there)
            device.step(loss=on_device(torch.tensor(2.0)))
    assert any("a step was skipped: tensor" in str(warning.message) for warning in warned), warned
    try:
        device.wait_report()
        raise AssertionError
    except ValueError as error:
        assert "param_groups[0]" in str(error) and "on all ranks that hold it" in str(error), error
    assert all(torch.equal(p, q.as_subclass(torch.Tensor)) for p, q in zip(before, there, strict=True))


def adaptive_of_all():
    """Only the loss is added up; the step is several launches."""
    several_processes(2, lambda buffer: buffer.mul_(2))
    params = [[place(torch.ones(40, 30)).requires_grad_()] for place in (lambda x: x, on_device)]
    (here, there), (cpu, device) = params, [AdaptiveRFD(list_of_one) for list_of_one in params]
    assert device.kernels == "none"
    for optimizer in (cpu, device):
        places = [TensorPlace(name, 0) for name in optimizer._names()]
        optimizer._reduction = Reduction(None, places, elements=1200, same=True, count=0)
    for _ in range(3):
        set_grads(here, there)
        cpu.step(loss=2.25)
        device.step(loss=2.25)
        check(here, there, cpu, device)
    assert (cpu.kernels, device.kernels) == ("CPU", "f32_averaged")
    (_, _), (there, device) = make({})
    set_grads(there, there)
    device.step(loss=2.25)
    assert "generic, slower than the others: tensors `" in device.kernels, device.kernels


def what_differs():
    """Another process has another gradient scale, then other parameters: steps are skipped, not taken."""
    scales = []

    def add_up(buffer):
        # Of 2.0 and of another one.
        scales.append(buffer[sharded._GIVEN].item())
        buffer.mul_(2)
        buffer[sharded._GIVEN] += 1.0

    several_processes(2, add_up)
    p = on_device(torch.ones(40, 30)).requires_grad_()
    optimizer = AdaptiveRFD([p])
    places = [TensorPlace(name, 0) for name in optimizer._names()]
    optimizer._reduction = reduction = Reduction(None, places, elements=1200, same=True, count=0)
    before = p.as_subclass(torch.Tensor).clone()
    for scale in (2.0, 4.0, 4.0):
        p.grad = on_device(torch.ones_like(p))
        optimizer.grad_scale = on_device(torch.tensor(scale))
        optimizer.step(loss=2.25)
    # Nothing waits, so that the word of a scale is its bits'.
    assert scales[0] != scales[1] == scales[2]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert optimizer.wait_report().outcome == "found_inf"
    assert any("gradient scales, or tensors that have" in str(warning.message) for warning in warned), warned
    assert optimizer.report.skipped_steps == 3
    dist.all_reduce = lambda buffer, group: None
    try:
        # As after a change of the groups.
        reduction.renew(DEVICE)
        raise AssertionError
    except RuntimeError as error:
        assert "the groups of this process have other parameters" in str(error), error
    # For the others.
    assert reduction._buffer[sharded._FOUND_INF] == 1.0
    assert torch.equal(before, p.as_subclass(torch.Tensor))


def from_address(memory, device):
    (count,) = memory["shape"]
    assert (device, memory["typestr"]) == (DEVICE, "<f8")
    address, read_only = memory["data"]
    # PyTorch refuses memory that is for reading only.
    assert not read_only
    return torch.frombuffer((ctypes.c_char * (8 * count)).from_address(address), dtype=torch.float64)


def errors():
    _, (there, device) = make({})
    for p in there:
        p.grad = on_device(torch.ones_like(p))
    try:
        device.step(loss=types.SimpleNamespace())
        raise AssertionError
    except TypeError:
        pass
    device.param_groups[0]["lr"] = on_device(torch.tensor(1.0))
    try:
        device.step(loss=2.0)
        raise AssertionError
    except TypeError as error:
        assert "lr is a tensor on cuda:0" in str(error)


TESTS = (steps, scaled, graph, errors, sharded_steps, sharded_adaptive, adaptive_of_all, what_differs)

if __name__ == "__main__":
    prepare()
    for test in TESTS:
        test()
        print(test.__name__, "passed")
    print("all passed")
