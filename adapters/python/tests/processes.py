"""Tests that several processes run together, over gloo."""

import importlib
import os
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

with_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch was built without gloo"
)


def check_equal_everywhere(value):
    """Bitwise: numbers and tensors alike."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    for other in gathered:
        if isinstance(value, torch.Tensor):
            assert torch.equal(other, gathered[0])
        else:
            assert repr(other) == repr(gathered[0])


def run(rank, ranks, port, module, test, folder, errors):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        for name in test:
            print(f"rank {rank}: {name}", file=sys.stderr)
            getattr(importlib.import_module(module), name)(folder)
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"process {rank}:\n{traceback.format_exc()}")
        raise


def spawn(ranks, module, tests, folder):
    """Runs functions of a module, each with the folder, in as many processes; fails with what one raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Processes fork from one that has imported everything once.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([module])
    errors = context.SimpleQueue()
    processes = [
        context.Process(target=run, args=(rank, ranks, port, module, tests, str(folder), errors), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            if not errors.empty() or any(process.exitcode not in (None, 0) for process in processes):
                break
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    if not errors.empty():
        pytest.fail(errors.get())
    assert [process.exitcode for process in processes] == [0] * ranks
