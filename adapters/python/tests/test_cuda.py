"""CUDA tensors: on a GPU where there is one, and on a driver whose GPU is the kernels' CPU shim."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from rfdescent import RFD

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not (ROOT / "tests/fake_cuda/driver.cpp").is_file():
        pytest.skip("needs a C++ compiler and the repository: the fake driver is made from its kernels")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
    command += ["-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-pthread", "-o", folder / "libcuda.so.1"]
    sources = ["tests/fake_cuda/driver.cpp", "kernels/shim/kernels.cpp", "kernels/shim/block.cpp"]
    subprocess.run([*command, *(ROOT / source for source in sources)], check=True)
    return folder


def test_on_a_fake_driver(fake_driver):
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{fake_driver}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    done = subprocess.run(
        [sys.executable, HERE / "cuda_program.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all passed\n")


def test_importing_needs_no_driver():
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    program = (
        "import rfdescent, sys; loaded = open('/proc/self/maps').read(); "
        "sys.exit('libcuda.so' in loaded or 'torch.distributed.tensor' in sys.modules)"
    )
    if not Path("/proc/self/maps").exists():
        program = "import rfdescent"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def pair(cov, **options):
    """The same network on the CPU and on the GPU."""
    here = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))
    there = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).cuda()
    there.load_state_dict(here.state_dict())
    return [(m, RFD(m.parameters(), covariance_model=cov, **options)) for m in (here, there)]


@gpu
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"norm_lock": True}], ids=str
)
def test_the_bits_of_the_cpu(cov, options):
    (here, cpu), (there, device) = pair(cov, **options)
    for k in range(4):
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cuda()
        loss = torch.tensor(2.5 - k / 10)
        cpu.step(loss=loss)
        device.step(loss=loss.cuda())
    assert device.wait_report() == cpu.report
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(p, q.cpu())
    device.load_state_dict(cpu.state_dict())
    assert device.state_dict()["state"].keys() == cpu.state_dict()["state"].keys()


@gpu
def test_nothing_waits(cov):
    _, (model, optimizer) = pair(cov, momentum=0.5)
    x = torch.randn(8, 30, device="cuda")
    for k in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean() + 2
        loss.backward()
        if k > 0:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.wait_report().applied_steps == 3


@gpu
def test_cuda_graph(cov):
    (here, cpu), (there, device) = pair(cov, momentum=0.5)
    loss = torch.tensor(2.5, device="cuda")
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.cuda()
    cpu.step(loss=2.5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        device.step(loss=loss)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.step(loss=loss)
    for k in range(3):
        loss.fill_(2.0 - k / 4)
        for group in (*cpu.param_groups, *device.param_groups):
            group["lr"] = 1 / (k + 1)
        device.push_settings()
        graph.replay()
        cpu.step(loss=2.0 - k / 4)
        assert device.wait_report() == cpu.report
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(p, q.cpu())


@gpu
def test_gradient_scaler(cov):
    _, (model, optimizer) = pair(cov)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    x = torch.randn(8, 30, device="cuda")
    for bad in (False, True, False):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean() + 2
        scaler.scale(loss).backward()
        if bad:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer, loss=loss)
        scaler.update()
    report = optimizer.wait_report()
    assert (report.applied_steps, report.skipped_steps) == (2, 1)


@gpu
def test_nothing_waits_for_an_observed_loss(cov):
    _, (model, optimizer) = pair(cov)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    x = torch.randn(8, 30, device="cuda")
    for k in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean() + 2
        if k > 0:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.observe(loss, scaler=scaler)
            scaler.scale(loss / 2).backward()
            optimizer.grad_scale = scaler.scale(torch.ones((), device="cuda"))
            optimizer.step()
            del optimizer.grad_scale
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert optimizer.wait_report().loss == pytest.approx(loss.item() / 2, rel=1e-6)


@gpu
def test_an_observed_loss_in_a_cuda_graph(cov):
    """Forward, backward and step in one graph; a step outside of the graph of its loss is refused."""
    _, (model, optimizer) = pair(cov)
    x = torch.randn(8, 30, device="cuda")

    def whole(step=True):
        optimizer.zero_grad(set_to_none=False)
        loss = optimizer.observe(model(x).square().mean() + 2)
        loss.backward()
        if step:
            optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = whole()
    for k in range(3):
        x.fill_(0.1 * k)
        graph.replay()
        assert optimizer.wait_report().loss == pytest.approx(loss.item(), rel=1e-6)
    part = torch.cuda.CUDAGraph()
    with torch.cuda.graph(part):
        whole(step=False)
    with pytest.raises(RuntimeError, match="one is within a CUDA graph and one outside"):
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_fully_shard_over_one_process(cov, device, tmp_path):
    backend = "nccl" if device == "cuda" else "gloo"
    if not dist.is_available() or not dist.is_backend_available(backend):
        pytest.skip(f"PyTorch was built without {backend}")
    whole = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).to(device)
    parts = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).to(device)
    parts.load_state_dict(whole.state_dict())
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh(device, (1,))
        fully_shard(parts, mesh=mesh)
        x = torch.randn(8, 30, device=device)
        losses = []
        for model in (whole, parts):
            optimizer = RFD(model.parameters(), covariance_model=cov, momentum=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean() + 2
                loss.backward()
                optimizer.step(loss=loss)
            assert optimizer.wait_report().applied_steps == 2
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p, rtol=1e-6, atol=1e-6)
    finally:
        dist.destroy_process_group()
