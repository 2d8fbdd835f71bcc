"""Threads of steps on the CPU: as many as PyTorch's, and in processes that are forked."""

import concurrent.futures
import copy
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import rfdescent
from rfdescent import AdaptiveRFD

# Above the size from which threads are used.
COUNT = 300_007

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")


def made():
    parameter = torch.nn.Parameter(torch.linspace(0, 1, COUNT))
    parameter.grad = torch.linspace(-1, 1, COUNT)
    return parameter, AdaptiveRFD([parameter])


def step(optimizer):
    optimizer.step(loss=1.0)


def named():
    names = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    return sum(open(name).read().strip() == "rfdescent" for name in names)


def threads(expected):
    """The library's threads, once they are as many; each gives itself its name when it first runs."""
    until = time.monotonic() + 20
    while named() != expected and time.monotonic() < until:
        time.sleep(0.01)
    return named()


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
    rfdescent.set_threads(None)


def test_they_are_as_many_as_those_of_pytorch(torch_threads):
    if "RAYON_NUM_THREADS" in os.environ:
        pytest.skip("RAYON_NUM_THREADS is set")
    torch_threads(1)
    expected, optimizer = made()
    step(optimizer)
    assert threads(0) == 0
    # Not 1: threads that have started stay as long as there is an optimizer, of an earlier test too.
    for count in (3, 2):
        torch_threads(count)
        parameter, optimizer = made()
        step(optimizer)
        assert threads(count - 1) == count - 1
        assert torch.equal(parameter, expected)
    # With the optimizer that there is, more and fewer.
    for count in (4, 2):
        rfdescent.set_threads(count)
        step(optimizer)
        assert threads(count - 1) == count - 1
    for count in (0, 1025):
        with pytest.raises(ValueError, match="at least 1 and at most 1024"):
            rfdescent.set_threads(count)
    for wrong in ("2", 2.0, True):
        with pytest.raises(TypeError, match="must be a whole number or None"):
            rfdescent.set_threads(wrong)


def test_the_environment_decides():
    program = (
        "import torch, rfdescent; from test_threads import *; torch.set_num_threads(3); "
        "_, o = made(); step(o); "
        "assert threads(1) == 1"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "2", "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def child(inherited, expected):
    torch.set_num_threads(1)
    rfdescent.set_threads(2)
    if inherited is not None:
        step(inherited[1])
    parameter, optimizer = made()
    step(optimizer)
    assert torch.equal(parameter, expected)
    assert threads(1) == 1


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_forked_processes_take_steps(torch_threads, steps_before):
    rfdescent.set_threads(2)
    parameter, optimizer = made()
    step(optimizer)
    expected = parameter.detach().clone()
    inherited = made()
    for _ in range(steps_before):
        step(inherited[1])
    process = multiprocessing.get_context("fork").Process(target=child, args=(inherited, expected))
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    assert not hangs and process.exitcode == 0
    step(optimizer)


def test_states_and_reports_are_read_between_the_steps_of_another_thread():
    parameter, optimizer = made()
    step(optimizer)
    stop, read = threading.Event(), []

    def look():
        while not stop.is_set():
            read.append((optimizer.report.applied_steps, optimizer.state_dict()["state"][0]["step"]))
            copy.deepcopy(optimizer)
            optimizer.push_settings()
            assert optimizer.kernels in ("none", "CPU")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(200):
            step(optimizer)
        stop.set()
        looking.result()
    assert optimizer.report.applied_steps == 201
    assert all(report <= state <= 201 for report, state in read)


def test_a_fork_while_another_thread_has_its_turn():
    _, optimizer = made()
    step(optimizer)
    held, leave = threading.Event(), threading.Event()

    def hold():
        with optimizer._turn:
            held.set()
            leave.wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        held.wait()
        process = multiprocessing.get_context("fork").Process(target=optimizer.state_dict)
        process.start()
        process.join(60)
        hangs = process.is_alive()
        process.kill()
        leave.set()
    assert not hangs and process.exitcode == 0
