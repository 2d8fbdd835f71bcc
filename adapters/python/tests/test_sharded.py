"""Training on 2 and 4 processes over gloo on the CPU."""

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import check_equal_everywhere, spawn, with_gloo
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from rfdescent import RFD, AdaptiveRFD, SquaredExponential

COV = SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=500)


class Network(torch.nn.Module):
    """Sizes that no number of processes divides, a tensor smaller than it, a tied weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.first = torch.nn.Linear(7, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.tied = torch.nn.Linear(7, 7)
        self.tied.weight = self.first.weight
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.tied(self.norm(torch.tanh(self.first(x))))))


def batch(step, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 7, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def train(model, optimizer, steps, data=batch, first=0):
    reports = []
    for k in range(first, first + steps):
        x, y = data(k)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
        reports.append(optimizer.report)
    return reports


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def published(params, **options):
    return RFD(params, covariance_model=COV, **options)


def check(model, optimizer, steps, data=batch, method=published, **options):
    """Trains beside the same network in one process: equal but for rounding; on all processes bitwise."""
    single = Network()
    alone = method(single.parameters(), process_group=None, **options)
    for k in range(steps):
        (report,) = train(model, optimizer, 1, data, first=k)
        check_equal_everywhere(report)
        (expected,) = train(single, alone, 1, first=k)
        # Gradients are sums of 16 terms of float32 in another order; so are later losses.
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert report.step_size == pytest.approx(expected.step_size, rel=1e-4)
        assert report.applied_steps == k + 1
    # Each counted once, whoever has it.
    assert optimizer._elements(optimizer._engine) == sum(p.numel() for p in single.parameters())
    parameters = {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}
    for name, p in single.named_parameters():
        assert torch.allclose(parameters[name], p, rtol=1e-3, atol=1e-4), name
        check_equal_everywhere(parameters[name])


def of_rank(k):
    return batch(k, dist.get_rank(), dist.get_world_size())


def ddp(_):
    options = {"lr": 0.1, "momentum": 0.5, "batch_size": 16}
    model = DistributedDataParallel(Network())
    check(model, RFD(model.named_parameters(), covariance_model=COV, **options), 4, of_rank, **options)


def ddp_adaptive(_):
    """Whole tensors everywhere; norm lock, which RFD must refuse, is there."""
    for options in ({}, {"lr": 0.5, "weight_decay": 0.01, "norm_lock": True}):
        model = DistributedDataParallel(Network())
        optimizer = AdaptiveRFD(model.named_parameters(), **options)
        check(model, optimizer, 8, of_rank, AdaptiveRFD, **options)
    # A replicated DTensor is whole too, and so is a shard of one process.
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    values = torch.linspace(-1, 1, 8)
    params = [torch.nn.Parameter(values.clone())]
    for placement in (Replicate(), Shard(0)):
        sharded = distribute_tensor(values.clone(), mesh, [Replicate(), placement])
        params.append(torch.nn.Parameter(sharded))
    optimizer = AdaptiveRFD(params)
    for k in range(3):
        for p in params:
            p.grad = torch.full_like(p, k + 1.0)
        optimizer.step(loss=2.0 + dist.get_rank())
        assert optimizer.report.loss == 2.0 + (dist.get_world_size() - 1) / 2
        check_equal_everywhere(optimizer.report)
    assert all(torch.equal(whole(p), params[0]) and not torch.equal(whole(p), values) for p in params)


def adaptive_skips(_):
    """What makes one process skip makes all skip; what one process can't step fails in all."""
    one = dist.get_rank() == 1
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = AdaptiveRFD([("weight", p)])
    p.grad = torch.ones(2, 3)
    optimizer.step(loss=2.0)
    before = p.detach().clone()
    optimizer.step(loss=math.nan if one else 2.0)
    assert optimizer.report.outcome == "non_finite_loss"
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(one)), torch.tensor(2.0)
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "found_inf"
    p.grad = torch.ones(2, 3).to_sparse() if one else torch.ones(2, 3)
    error, text = (ValueError, "sparse") if one else (RuntimeError, "process 1 failed.*sparse")
    with pytest.raises(error, match=text):
        optimizer.step(loss=2.0)
    assert torch.equal(p, before)
    check_equal_everywhere(optimizer.report)


def sharded_adaptive(_):
    """FSDP2, in one dimension and with replicas, where a process has nothing of some tensors."""
    ranks = dist.get_world_size()
    hybrid = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"lr": 0.5, "weight_decay": 0.01}
    for mesh in (init_device_mesh("cpu", (ranks,)), hybrid):
        model = Network()
        fully_shard(model.last, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = AdaptiveRFD(model.named_parameters(), **options)
        check(model, optimizer, 12, of_rank, AdaptiveRFD, **options)
        for entry in optimizer.state_dict()["state"].values():
            # What processes share is the same in all.
            for values in entry.values():
                if not isinstance(values, DTensor):
                    check_equal_everywhere(values)


def adaptive_without_elements(_):
    """What has none goes on from its own state."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in ((0,), (0, 3), (3, 0)):
        empty, full = (
            torch.nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)]))
            for size in (shape, (4, 3))
        )
        optimizer = AdaptiveRFD([empty, full])
        for steps in (1, 2):
            for p in (empty, full):
                p.grad = distribute_tensor(torch.ones(p.shape), mesh, [Shard(0)])
            optimizer.step(loss=1.0)
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.report.applied_steps == steps


def adaptive_refuses(_):
    """By the name of the method and with what to do."""
    model = Network()
    fully_shard(model)
    with pytest.raises(ValueError, match="`first.weight` is a DTensor of several .* process_group is None"):
        train(model, AdaptiveRFD(model.named_parameters(), process_group=None), 1, of_rank)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has norm_lock, which several processes can't"):
        train(model, AdaptiveRFD(model.named_parameters(), norm_lock=True), 1, of_rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    prime = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4099), mesh, [Shard(0)]))
    prime.grad = distribute_tensor(torch.ones(4, 4099), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="tensor `prime` is sharded, but its rows of 4099 elements"):
        AdaptiveRFD([("prime", prime)]).step(loss=2.0)
    local = torch.ones(3, 2).t()
    lying = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    lying.grad = distribute_tensor(torch.ones(lying.shape), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="tensor `lying` is sharded, and its parts are not contiguous"):
        AdaptiveRFD([("lying", lying)]).step(loss=2.0)
    p = torch.nn.Parameter(torch.ones(8))
    p._fsdp_flattened = True
    p.grad = torch.ones(8)
    with pytest.raises(ValueError, match=r"tensor `weight` belongs to Fully.*use fully_shard"):
        AdaptiveRFD([("weight", p)]).step(loss=2.0)
    # A stage of a pipeline.
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    with pytest.raises(RuntimeError, match="process 1 has other tensors than process 0, but AdaptiveRFD"):
        AdaptiveRFD([(f"stage{dist.get_rank()}", p)]).step(loss=2.0)
    with pytest.raises(RuntimeError, match="options .* of process 1 differ from those of process 0"):
        AdaptiveRFD([p], loss_bound=-dist.get_rank()).step(loss=2.0)
    assert torch.equal(p, torch.ones(8))


def fsdp(_):
    options = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    model = Network()
    # Tied weights must be sharded together.
    fully_shard(model.last)
    fully_shard(model)
    optimizer = RFD(model.parameters(), covariance_model=COV, **options)
    # The three rows of the last layer are fewer than four processes: one has nothing of it.
    counts = [p.to_local().numel() for p in model.last.parameters()]
    check(model, optimizer, 4, of_rank, **options)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    if dist.get_world_size() == 4:
        assert [0, 0] in gathered


def fsdp_hybrid(_):
    """Sharded in pairs, replicated between these."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = Network()
    fully_shard(model, mesh=mesh)
    options = {"lr": 0.1, "momentum": 0.5}
    check(model, RFD(model.parameters(), covariance_model=COV, **options), 3, of_rank, **options)


class Block(torch.nn.Module):
    """For tensor parallel: a layer split by columns, one by rows, one replicated on sequence shards."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def parallel(mesh, sequence):
    model = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
    return parallelize_module(model, mesh, plan)


def check_block(model, optimizer, sequence_data, method, steps, **options):
    single = Block()
    alone = method(single.named_parameters(), process_group=None, **options)
    for k in range(steps):
        for net, opt, x in ((model, optimizer, sequence_data(k)), (single, alone, tokens(k))):
            opt.zero_grad()
            loss = net(x).square().mean() + 2
            loss.backward()
            opt.step(loss=loss)
        check_equal_everywhere(optimizer.report)
        assert optimizer.report.grad_norm == pytest.approx(alone.report.grad_norm, rel=1e-4)
        assert optimizer.report.step_size == pytest.approx(alone.report.step_size, rel=1e-4)
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert torch.allclose(whole(p), q, rtol=1e-3, atol=1e-4), name


BLOCKS = [(published, {"lr": 0.01, "momentum": 0.5}, 3), (AdaptiveRFD, {"lr": 0.5}, 12)]


def tokens(k):
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(k))


def tensor_parallel(_):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for sequence, (method, options, steps) in itertools.product((False, True), BLOCKS):
        model = parallel(mesh, sequence)
        optimizer = method(model.named_parameters(), **options)

        def data(k, sequence=sequence):
            x = tokens(k)
            # With sequence parallel each process has its part of the tokens.
            return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] if sequence else x

        check_block(model, optimizer, data, method, steps, **options)


def fsdp_and_tensor_parallel(_):
    """Two dimensions of sharding at once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    part = mesh["data"].get_local_rank()
    for method, options, steps in BLOCKS:
        model = parallel(mesh["tensor"], sequence=False)
        fully_shard(model, mesh=mesh["data"])
        optimizer = method(model.named_parameters(), **options)
        data = [tokens(k).chunk(mesh["data"].size())[part] for k in range(steps)]
        check_block(model, optimizer, data.__getitem__, method, steps, **options)


def half_precision(_):
    """bfloat16 shards with float32 master weights, and stochastic rounding with the bits of one process."""
    model = Network().to(torch.bfloat16)
    fully_shard(model)
    optimizer = RFD(model.parameters(), covariance_model=COV, lr=0.1, master_weights=True)
    for k in range(3):
        x, y = of_rank(k)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.bfloat16()), y)
        loss.backward()
        optimizer.step(loss=loss)
        check_equal_everywhere(optimizer.report)
    for p in model.parameters():
        check_equal_everywhere(whole(p))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, grad = torch.ones(13, 5, dtype=torch.bfloat16), torch.full((13, 5), 0.5, dtype=torch.bfloat16)
    rounded = []
    for placements in ([Replicate()], [Shard(0)]):
        p = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, placements))
        optimizer = RFD([p], covariance_model=COV, lr=1e-2, stochastic_rounding=3)
        for _ in range(5):
            p.grad = distribute_tensor(grad, mesh, placements)
            optimizer.step(loss=2.0)
        rounded.append(whole(p))
    assert len(rounded[0].unique()) > 1
    assert torch.equal(*rounded)


def mixed_precision(_):
    """FSDP's own mixed precision: float32 shards, bfloat16 in forward and backward."""
    model = Network()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = RFD(model.parameters(), covariance_model=COV, lr=0.1)
    for report in train(model, optimizer, 3, of_rank):
        check_equal_everywhere(report)
        assert report.outcome == "applied"


def skips(_):
    """A loss or gradient that is not finite on one process makes all skip."""
    model = Network()
    fully_shard(model)
    optimizer = RFD(model.parameters(), covariance_model=COV, lr=0.1, momentum=0.5)
    train(model, optimizer, 1, of_rank)
    before = [p.to_local().clone() for p in model.parameters()]
    one = dist.get_rank() == 1
    optimizer.step(loss=math.nan if one else 2.0)
    assert optimizer.report.outcome == "non_finite_loss"
    if one:
        next(model.parameters()).grad.to_local().flatten()[0] = math.inf
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "non_finite_gradient"
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(one)), torch.tensor(2.0)
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "found_inf"
    assert all(torch.equal(b, p.to_local()) for b, p in zip(before, model.parameters(), strict=True))
    check_equal_everywhere(optimizer.report)


def scaler(_):
    """GradScaler on shards: the bits of training without it, as scales are powers of two."""
    models = [Network(), Network()]
    optimizers = []
    for model in models:
        fully_shard(model)
        optimizers.append(RFD(model.parameters(), covariance_model=COV, lr=0.1))
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for k in range(3):
        x, y = of_rank(k)
        loss = torch.nn.functional.cross_entropy(models[1](x), y)
        optimizers[1].zero_grad()
        scale.scale(loss).backward()
        scale.step(optimizers[1], loss=loss)
        scale.update()
        (report,) = train(models[0], optimizers[0], 1, of_rank, first=k)
        assert report == optimizers[1].report
        check_equal_everywhere(report)


def checkpoint(folder):
    """Saved on FSDP shards and going on from it, also with other sharding."""

    def make(sharded):
        model = Network()
        if sharded:
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        return model, RFD(model.parameters(), covariance_model=COV, lr=0.1, momentum=0.9)

    model, optimizer = make(True)
    train(model, optimizer, 3, of_rank)
    weights, state = get_state_dict(model, optimizer)
    assert all(isinstance(entry["velocity"], DTensor) for entry in state["state"].values())
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    train(model, optimizer, 2, of_rank, first=3)
    for sharded in (True, False):
        other, resumed = make(sharded)
        weights, state = get_state_dict(other, resumed)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
        assert resumed.report.applied_steps == 3
        train(other, resumed, 2, of_rank, first=3)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if sharded:
                assert torch.equal(whole(p), whole(q))
            else:
                # DDP adds up gradients in another order.
                assert torch.allclose(whole(p), whole(q), rtol=1e-3, atol=1e-4)
    copied = copy.deepcopy(optimizer.state_dict())
    assert isinstance(copied["state"][0]["velocity"], DTensor)


def adaptive_checkpoint(folder):
    """The same with the variances of rows and columns; FSDP2, with replicas, tensor parallel on it, DDP."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))

    def make(kind):
        model = Block()
        if "parallel" in kind:
            model = parallel(mesh["tensor"], sequence=False)
            fully_shard(model, mesh=mesh["data"])
        elif kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=mesh if kind == "hybrid" else None)
        return model, AdaptiveRFD(model.parameters())

    def run(model, optimizer, steps, first=0):
        # All processes have all tokens, so that every kind has the same gradients.
        for k in range(first, first + steps):
            optimizer.zero_grad()
            loss = model(tokens(k)).square().mean() + 2
            loss.backward()
            optimizer.step(loss=loss)

    model, optimizer = make("fsdp")
    run(model, optimizer, 10)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    run(model, optimizer, 5, first=10)
    for kind in ("fsdp", "hybrid", "parallel", "ddp"):
        other, resumed = make(kind)
        weights, state = get_state_dict(other, resumed)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
        assert resumed.report.applied_steps == 10
        run(other, resumed, 5, first=10)
        check_equal_everywhere(resumed.report)
        assert resumed.report.trust == optimizer.report.trust
        assert resumed.report.learning_rate == pytest.approx(optimizer.report.learning_rate, rel=1e-5)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if kind == "fsdp":
                assert torch.equal(whole(p), whole(q))
            else:
                assert torch.allclose(whole(p), whole(q), rtol=1e-3, atol=1e-4)


def saved_on_some(folder):
    """The first part of a training, whose state other processes go on from."""
    model = Network()
    fully_shard(model)
    optimizer = AdaptiveRFD(model.named_parameters())
    train(model, optimizer, 10, of_rank)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resumed_on_others(folder):
    """The second part, beside the same training in one process."""
    single = Network()
    alone = AdaptiveRFD(single.named_parameters(), process_group=None)
    train(single, alone, 10)
    model = Network()
    fully_shard(model)
    optimizer = AdaptiveRFD(model.named_parameters())
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for k in range(10, 15):
        train(single, alone, 1, first=k)
        train(model, optimizer, 1, of_rank, first=k)
        check_equal_everywhere(optimizer.report)
        assert optimizer.report.applied_steps == k + 1
        assert optimizer.report.trust == alone.report.trust
        assert optimizer.report.step_size == pytest.approx(alone.report.step_size, rel=1e-4)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(whole(p), q, rtol=1e-3, atol=1e-4)


def long_rows(_):
    """Rows and vectors of more than 4096 elements are one row where processes hold pieces of them; whole
    again they are cut, with what they had.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(shape, generator=generator) for shape in ((3, 8192), (3, 8192), (6000,))]
    placements = [Shard(0), Shard(1), Shard(0)]

    def parameters(cut):
        return [
            torch.nn.Parameter(distribute_tensor(v.clone(), mesh, [place if cut else Replicate()]))
            for v, place in zip(values, placements)
        ]

    def take(optimizer, params, steps, first=0):
        for k in range(first, first + steps):
            generator = torch.Generator().manual_seed(k)
            for p in params:
                grad = torch.randn(p.shape, generator=generator)
                p.grad = distribute_tensor(grad, mesh, p.placements)
            optimizer.step(loss=2.0)
            check_equal_everywhere(optimizer.report)

    cut, joined = parameters(True), parameters(False)
    optimizer, other = AdaptiveRFD(cut), AdaptiveRFD(joined)
    take(optimizer, cut, 5)
    other.load_state_dict(get_whole(optimizer))
    for index, (of_rows, kept) in enumerate([((3, 2), False), ((3, 2), True), ((2,), True)]):
        (rows,) = (v for k, v in other.state_dict()["state"][index].items() if k.startswith("rows("))
        assert rows.shape == of_rows
        # One variance in all pieces.
        assert kept == bool((rows == rows[..., :1]).all())
    # And back, with the same bits.
    again = parameters(True)
    resumed = AdaptiveRFD(again)
    resumed.load_state_dict(other.state_dict())
    for p, q in zip(again, cut):
        p.data.copy_(q)
    take(optimizer, cut, 3, first=5)
    take(resumed, again, 3, first=5)
    assert resumed.report == optimizer.report
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(cut, again))


def get_whole(optimizer):
    """A state as one process has it."""
    state = optimizer.state_dict()
    entries = {
        index: {key: whole(values) for key, values in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def adaptive_half_precision(_):
    """bfloat16 shards with master weights beside whole ones: bits of the same rounding but for rare ties."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(5)
    values = torch.randn((40, 30), generator=generator).to(torch.bfloat16)
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        p = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, [placement]))
        optimizer = AdaptiveRFD([("weight", p)], master_weights=True)
        for k in range(12):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
            p.grad = distribute_tensor(grad, mesh, [placement])
            optimizer.step(loss=2.0)
            check_equal_everywhere(optimizer.report)
        found.append(whole(p))
    for cut in found[1:]:
        assert int((cut != found[0]).sum()) <= 2
    assert not torch.equal(found[0], values)


def adaptive_shards_skip(_):
    """What makes one process skip makes all skip; what one can't step fails in all."""
    one = dist.get_rank() == 1
    model = Network()
    fully_shard(model)
    optimizer = AdaptiveRFD(model.named_parameters())
    train(model, optimizer, 2, of_rank)
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer.step(loss=math.nan if one else 2.0)
    assert optimizer.report.outcome == "non_finite_loss"
    grad = model.first.weight.grad.to_local()
    kept = grad.clone()
    if one:
        grad.flatten()[0] = math.inf
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "non_finite_gradient"
    grad.copy_(kept)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(one)), torch.tensor(2.0)
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "found_inf"
    error, text = (ValueError, "one number") if one else (RuntimeError, "process 1 failed.*one number")
    with pytest.raises(error, match=text):
        optimizer.step(loss=torch.ones(2) if one else 2.0)
    # Before the step itself.
    if one:
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(0.0)
        optimizer.observe(torch.ones((), requires_grad=True)).backward()
    with pytest.raises((RuntimeError, ValueError), match="process 1 failed" if not one else "scale"):
        optimizer.step(loss=None if one else 2.0)
    if one:
        model.first.weight.grad = None
    with pytest.raises(ValueError, match="`first.weight`: has a gradient on 1 of the ranks"):
        optimizer.step(loss=2.0)
    assert all(torch.equal(b, p.to_local()) for b, p in zip(before, model.parameters(), strict=True))
    check_equal_everywhere(optimizer.report)


def whole_state_into_shards(_):
    """The state of one process's training goes on in shards."""
    single = Network()
    alone = RFD(single.parameters(), covariance_model=COV, lr=0.1, momentum=0.9, process_group=None)
    train(single, alone, 2)
    model = Network()
    model.load_state_dict(single.state_dict())
    fully_shard(model)
    optimizer = RFD(model.parameters(), covariance_model=COV)
    optimizer.load_state_dict(alone.state_dict())
    # Before a step too.
    for entry, p in zip(optimizer.state_dict()["state"].values(), model.parameters(), strict=True):
        velocity = entry["velocity"]
        assert isinstance(velocity, DTensor)
        assert velocity.placements == p.placements
    entries = zip(optimizer.state_dict()["state"].values(), alone.state_dict()["state"].values(), strict=True)
    assert all(torch.equal(whole(a["velocity"]), b["velocity"]) for a, b in entries)
    train(single, alone, 2, first=2)
    train(model, optimizer, 2, of_rank, first=2)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(whole(p), q, rtol=1e-3, atol=1e-4)


def parameters_replaced(_):
    """As accelerate does with FSDP2: the model is sharded after the optimizer was made, whose groups are then
    given the new parameters in place of placeholders.
    """
    model = Network()
    old = [weakref.ref(p) for p in model.parameters()]
    options = {"lr": 0.1, "momentum": 0.5}
    optimizer = RFD(model.parameters(), covariance_model=COV, **options)
    # Its wrapper does so at once.
    optimizer.load_state_dict(optimizer.state_dict())
    group = optimizer.param_groups[0]
    group["params"] = [torch.empty(1) for _ in group["params"]]
    fully_shard(model)
    group["params"] = list(model.parameters())
    check(model, optimizer, 4, of_rank, **options)
    assert all(isinstance(entry["velocity"], DTensor) for entry in optimizer.state_dict()["state"].values())
    gc.collect()
    assert all(p() is None for p in old)


def refused(_):
    model = Network()
    fully_shard(model)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has norm_lock, which several processes can't"):
        RFD(model.named_parameters(), covariance_model=COV, norm_lock=True)
    with pytest.raises(
        ValueError, match="`first.weight` is a DTensor of several processes, but process_group is None"
    ):
        train(model, RFD(model.named_parameters(), covariance_model=COV, process_group=None), 1, of_rank)
    own = SquaredExponential(mean=2.7 + dist.get_rank(), variance=(1, 1), gradient_var=(1, 1), dims=9)
    with pytest.raises(RuntimeError, match="process 1 differ from those of process 0"):
        train(model, RFD(model.parameters(), covariance_model=own), 1, of_rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    optimizer = RFD([("weight", p)], covariance_model=COV)
    p.grad = distribute_tensor(torch.ones(8), mesh, [Replicate()])
    with pytest.raises(ValueError, match="`weight` is placed as .* but its gradient as"):
        optimizer.step(loss=2.0)

    # What FullyShardedDataParallel, which runs on accelerators only, marks its parameters with.
    p = torch.nn.Parameter(torch.ones(8))
    p._fsdp_flattened = True
    p.grad = torch.ones(8)
    with pytest.raises(ValueError, match=r"`weight` belongs to FullyShardedDataParallel.*use fully_shard"):
        RFD([("weight", p)], covariance_model=COV).step(loss=2.0)
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Partial()]))
    p.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
    with pytest.raises(ValueError, match="`weight` is placed as .*Partial.*redistribute"):
        RFD([("weight", p)], covariance_model=COV).step(loss=2.0)


def failures(_):
    """What one process can't step fails in all, which stay together and unchanged."""
    one = dist.get_rank() == 1
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RFD([("weight", p)], covariance_model=COV, momentum=0.5)

    def refused(message, **arguments):
        before = p.detach().clone()
        error, text = (ValueError, message) if one else (RuntimeError, f"process 1 failed.*{message}")
        with pytest.raises(error, match=text):
            optimizer.step(**{"loss": 2.0, **arguments})
        assert torch.equal(p, before)
        assert p._version == version

    version = p._version
    group = optimizer.param_groups[0]
    p.grad = torch.ones(2, 3)
    # Before the processes have agreed on anything, and while they do.
    group["lr"] = -1.0 if one else 1.0
    refused("lr = -1.0")
    group["lr"] = 1.0
    if one:
        p._fsdp_flattened = True
    refused("FullyShardedDataParallel")
    if one:
        del p._fsdp_flattened
    # When the first engine is made, and with one.
    for applied in (1, 2):
        version = p._version
        p.grad = torch.ones(2, 3).to_sparse() if one else torch.ones(2, 3)
        refused("sparse")
        p.grad = torch.ones(2, 3)
        refused("shape", loss=torch.ones(2) if one else 2.0)
        if one:
            p.grad = p.data
        refused("shares memory")
        p.grad = torch.ones(2, 3)
        optimizer.step(loss=2.0)
        assert optimizer.report.applied_steps == applied
        check_equal_everywhere(optimizer.report)
        check_equal_everywhere(p.detach())


def groups_that_change(_):
    """All processes take the same parameter out; those left are counted once."""
    model = Network()
    optimizer = RFD(model.named_parameters(), covariance_model=COV, lr=0.1, momentum=0.5)
    train(model, optimizer, 1, of_rank)
    velocity = optimizer.state_dict()["state"][1]["velocity"]
    optimizer.param_groups[0]["params"].pop(0)
    assert torch.equal(optimizer.state_dict()["state"][0]["velocity"], velocity)
    first = model.first.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(loss=2.0)
    assert torch.equal(model.first.weight, first)
    others = sum(p.numel() for p in model.parameters()) - first.numel()
    assert optimizer.report.grad_norm == pytest.approx(math.sqrt(others), rel=1e-12)


def pipeline(_):
    """Named parameters of different processes with equal shapes all count."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = RFD([(f"stage{rank}", p)], covariance_model=COV)
    p.grad = torch.full((4,), float(rank + 1))
    optimizer.step(loss=2.0)
    assert optimizer.report.grad_norm == math.sqrt(sum(4 * (r + 1) ** 2 for r in range(ranks)))


def subgroup(_):
    """Two groups that train different networks beside each other."""
    ranks = dist.get_world_size()
    groups = [dist.new_group(range(0, ranks // 2)), dist.new_group(range(ranks // 2, ranks))]
    number = int(dist.get_rank() >= ranks // 2)
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = RFD([p], covariance_model=COV, process_group=groups[number])
    p.grad = torch.full((4,), float(number + 1))
    optimizer.step(loss=2.0)
    assert optimizer.report.grad_norm == 2.0 * (number + 1)


# Starting processes takes longer than a test: those of one number of processes share them.
TESTS = {
    2: [
        "ddp",
        "ddp_adaptive",
        "adaptive_skips",
        "sharded_adaptive",
        "adaptive_checkpoint",
        "adaptive_half_precision",
        "adaptive_shards_skip",
        "long_rows",
        "adaptive_without_elements",
        "adaptive_refuses",
        "fsdp",
        "tensor_parallel",
        "half_precision",
        "mixed_precision",
        "skips",
        "scaler",
        "checkpoint",
        "whole_state_into_shards",
        "parameters_replaced",
        "refused",
        "failures",
        "groups_that_change",
        "pipeline",
    ],
    4: [
        "ddp",
        "ddp_adaptive",
        "sharded_adaptive",
        "adaptive_checkpoint",
        "adaptive_half_precision",
        "adaptive_without_elements",
        "adaptive_refuses",
        "fsdp",
        "fsdp_hybrid",
        "tensor_parallel",
        "fsdp_and_tensor_parallel",
        "half_precision",
        "skips",
        "checkpoint",
        "pipeline",
        "subgroup",
    ],
}


@with_gloo
@pytest.mark.parametrize("ranks", TESTS)
def test_processes(ranks, tmp_path):
    spawn(ranks, __name__, TESTS[ranks], tmp_path)


@with_gloo
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_going_on_with_another_number_of_processes(before, after, tmp_path):
    spawn(before, __name__, ["saved_on_some"], tmp_path)
    spawn(after, __name__, ["resumed_on_others"], tmp_path)


def test_a_group_of_one(tmp_path):
    spawn(1, __name__, ["alone"], tmp_path)


def alone(_):
    """One process needs no reduction, so that norm lock is there."""
    model = Network()
    fully_shard(model)
    optimizer = RFD(model.parameters(), covariance_model=COV, lr=0.1, norm_lock=True)
    train(model, optimizer, 2)
    assert optimizer.report.applied_steps == 2
