"""Several processes with the whole network each: losses that are observed, unlike numbers of batches, and
processes that differ where they should not.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from processes import check_equal_everywhere, spawn, with_gloo
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rfdescent import RFD, AdaptiveRFD, SquaredExponential

COV = SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=58)


def fitted(params, **options):
    return RFD(params, covariance_model=COV, **options)


METHODS = (fitted, AdaptiveRFD)


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(seed, n=24):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 7, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def of_rank(seed):
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(seed)]


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if "hold" in str(warning.message)] + [
        str(warning.message) for warning in caught if "settings of the groups" in str(warning.message)
    ]


def observed(_):
    """The mean over processes and accumulated batches, with DDP and with FSDP; ranks bitwise alike."""
    for wrap in (DistributedDataParallel, fully_shard):
        for make in METHODS:
            if wrap is fully_shard and make is AdaptiveRFD:
                continue
            single, model = network(), wrap(network())
            alone, optimizer = make(single.parameters(), process_group=None), make(model.parameters())
            for k in range(3):
                alone.zero_grad()
                x, y = batch(k)
                loss = cross_entropy(single(x), y)
                loss.backward()
                alone.step(loss=loss)
                optimizer.zero_grad()
                x, y = of_rank(k)
                for part in range(2):
                    loss = cross_entropy(model(x.chunk(2)[part]), y.chunk(2)[part])
                    (optimizer.observe(loss) / 2).backward()
                optimizer.step()
                # Means of means in float32.
                assert optimizer.report.loss == pytest.approx(alone.report.loss, rel=1e-4)
                check_equal_everywhere(optimizer.report)
            assert optimizer.report.step_size == pytest.approx(alone.report.step_size, rel=1e-4)


def missing(_):
    """A loss that one process has not observed fails in all."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = AdaptiveRFD([p])
    if dist.get_rank() == 0:
        optimizer.observe(p.sum()).backward()
    p.grad = torch.ones(2)
    error, text = (RuntimeError, "process 1 failed") if dist.get_rank() == 0 else (TypeError, "observe")
    with pytest.raises(error, match=text):
        optimizer.step()


def joined(_):
    """A process that is out of batches takes part; all end with parameters and state of the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for make in METHODS:
        for by_initial in (True, False):
            # Short steps, so that roundings don't grow.
            options = {"lr": 0.1, "momentum": 0.5} if make is fitted else {"lr": 0.1}
            model, single = DistributedDataParallel(network()), network()
            optimizer = make(model.named_parameters(), **options)
            alone = make(single.named_parameters(), process_group=None, **options)
            # The first process has the fewest, none at all at last: its norm must not be missing.
            counts = [3 + (k > 0) * 2 for k in range(ranks)]
            with Join([model, optimizer], divide_by_initial_world_size=by_initial):
                for k in range(counts[rank]):
                    optimizer.zero_grad()
                    x, y = of_rank(k)
                    optimizer.observe(cross_entropy(model(x), y)).backward()
                    optimizer.step()
            for k in range(5):
                alone.zero_grad()
                parts = [part.chunk(ranks) for part in batch(k)]
                present = [r for r in range(ranks) if k < counts[r]]
                divisor = ranks if by_initial else len(present)
                loss = sum(cross_entropy(single(parts[0][r]), parts[1][r]) for r in present) / divisor
                loss.backward()
                alone.step(loss=loss)
            state = optimizer.state_dict()["state"]
            assert state[0]["step"] == 5
            for values in state[0].values():
                check_equal_everywhere(values)
            if "velocity" in state[0]:
                expected = alone.state_dict()["state"][0]["velocity"]
                assert torch.allclose(state[0]["velocity"], expected, rtol=1e-3, atol=1e-4)
            for p, q in zip(model.parameters(), single.parameters(), strict=True):
                check_equal_everywhere(p.detach())
                assert torch.allclose(p, q, rtol=1e-3, atol=1e-4)
            # And they go on together.
            optimizer.zero_grad()
            x, y = of_rank(7)
            optimizer.observe(cross_entropy(model(x), y)).backward()
            optimizer.step()
            check_equal_everywhere(optimizer.report)


def joined_without_a_batch(_):
    """From the first step on."""
    model = DistributedDataParallel(network())
    optimizer = fitted(model.named_parameters())
    with Join([model, optimizer]):
        for k in range(2 * dist.get_rank()):
            optimizer.zero_grad()
            x, y = of_rank(k)
            optimizer.observe(cross_entropy(model(x), y)).backward()
            optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2 * (dist.get_world_size() - 1)
    for p in model.parameters():
        check_equal_everywhere(p.detach())


def joined_without_the_optimizer(_):
    """DDP's own join() is refused before collective operations meet others."""
    model = DistributedDataParallel(network())
    optimizer = AdaptiveRFD(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"DistributedDataParallel.join\(\) does not know.*Join\(\[model, opt"
    ):
        with model.join():
            for k in range(2 + dist.get_rank()):
                x, y = of_rank(k)
                optimizer.observe(cross_entropy(model(x), y)).backward()
                optimizer.step()


def joined_shards(_):
    model = fully_shard(network())
    optimizer = fitted(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"join\(\) needs all tensors in every process"):
        with Join([optimizer]):
            x, y = of_rank(0)
            optimizer.observe(cross_entropy(model(x), y)).backward()
            optimizer.step()


def rates_that_differ(_):
    for make in METHODS:
        model = DistributedDataParallel(network())
        optimizer = make(model.parameters())

        def steps(model=model, optimizer=optimizer):
            for k in range(2):
                optimizer.zero_grad()
                x, y = of_rank(k)
                optimizer.observe(cross_entropy(model(x), y)).backward()
                optimizer.step()

        assert warned(steps) == []
        optimizer.param_groups[0]["lr"] = 1.0 - 0.5 * dist.get_rank()
        # Parameters are the same before that step and differ after it.
        texts = warned(steps)
        assert [text for text in texts if "settings of the groups, such as lr, differ" in text] == texts[1:]
        assert "the processes hold different parameters" in texts[0]


def networks_that_differ(_):
    """DistributedDataParallel was forgotten: from the same or from other starts."""
    for make in METHODS:
        for seed in (0, dist.get_rank()):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
            optimizer = make(model.named_parameters())

            def steps(model=model, optimizer=optimizer):
                for k in range(3):
                    optimizer.zero_grad()
                    x, y = of_rank(k)
                    optimizer.observe(cross_entropy(model(x), y)).backward()
                    optimizer.step()

            (text,) = warned(steps)
            assert "wrap the model in DistributedDataParallel" in text


def of_ones(make, **options):
    """An optimizer of two whole tensors that has taken a step."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = make([("first", params[0]), ("second", params[1])], **options)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step(loss=2.0)
    return optimizer, params


def check_refused(optimizer, text, own=None, **arguments):
    """All processes raise the text, the second one `own` where its error is another one; nothing changes, and
    they go on together.
    """
    params = optimizer._parameters()
    before = [p.detach().clone() for p in params]
    one = dist.get_rank() == 1
    with pytest.raises((RuntimeError, ValueError), match=own if one and own is not None else text):
        optimizer.step(**{"loss": 2.0, **arguments})
    assert all(torch.equal(p, values) for p, values in zip(params, before, strict=True))


def check_goes_on(optimizer):
    applied = optimizer.report.applied_steps
    optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == applied + 1
    check_equal_everywhere([optimizer.report, *(p.detach() for p in optimizer._parameters())])


def refused_by_the_library(_):
    """What only the library finds in one process is told to the others before any of them takes the step."""
    one = dist.get_rank() == 1
    for make in METHODS:
        optimizer, params = of_ones(make)
        if one:
            params[0].grad = params[0].data
        check_refused(optimizer, "process 1 failed.*`first`.*shares memory", "^tensor `first`.*shares memory")
        params[0].grad = torch.ones(3)
        for scale in (0.0, -2.0, float("nan")):
            optimizer.grad_scale = torch.tensor(scale if one else 2.0)
            check_refused(optimizer, "process 1 failed.*grad_scale", "^grad_scale")
        check_goes_on(optimizer)


def scales_that_differ(_):
    for make in METHODS:
        optimizer, _ = of_ones(make)
        optimizer.grad_scale = torch.tensor(2.0 + 2.0 * (dist.get_rank() == 1))
        check_refused(optimizer, r"gradient scale of process 1: 4.0, of process 0: 2.0; no process has")
        check_goes_on(optimizer)


def gradients_that_one_lacks(_):
    for make in METHODS:
        optimizer, params = of_ones(make)
        if dist.get_rank() == 1:
            params[1].grad = None
        check_refused(optimizer, "tensors without a gradient of process 1: second, of process 0: none")
        params[1].grad = None
        check_goes_on(optimizer)


def states_of_one(_):
    """A state that one process alone has loaded, then all; a gradient that is not finite in one alone."""
    one = dist.get_rank() == 1
    for make in (lambda params: fitted(params, momentum=0.5), AdaptiveRFD):
        optimizer, params = of_ones(make)
        state = optimizer.state_dict()
        check_goes_on(optimizer)
        if one:
            optimizer.load_state_dict(state)
        check_refused(
            optimizer, "steps of process 1: 1 applied and 0 sk.*, of process 0: 2 app.*load the same"
        )
        optimizer.load_state_dict(state)
        check_goes_on(optimizer)
    # Each took the step from its own gradients: only the next one can tell.
    params[0].grad = torch.full((3,), float("nan") if one else 1.0)
    optimizer.step(loss=2.0)
    params[0].grad = torch.ones(3)
    check_refused(
        optimizer, "steps of process 1: 2 applied and 1 skipped, of process 0: 3 applied and 0 skip"
    )


def groups_of_one(_):
    """Parameters that one process alone adds or takes out; then all do."""
    one = dist.get_rank() == 1
    text = "process 1 failed.*the groups of this process have other parameters"
    for make in METHODS:
        for loads in (False, True):
            optimizer, params = of_ones(make)
            added = torch.nn.Parameter(torch.ones(2))
            added.grad = torch.ones(2)
            if one:
                optimizer.add_param_group({"params": [("third", added)]})
            check_refused(optimizer, text, "^the groups of this process")
            # They have nothing agreed on then, and compare all.
            check_refused(optimizer, "options or covariance model of process 1 differ")
            if not one:
                optimizer.add_param_group({"params": [("third", added)]})
            check_goes_on(optimizer)
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
            if one:
                optimizer.param_groups.pop()
            check_refused(optimizer, text, "^the groups of this process")
            if not one:
                optimizer.param_groups.pop()
            check_goes_on(optimizer)
            # A group that is refused changes nothing.
            if one:
                with pytest.raises(ValueError, match="lr = -1"):
                    optimizer.add_param_group({"params": [("third", added)], "lr": -1.0})
            check_goes_on(optimizer)


def zero(_):
    """ZeroRedundancyOptimizer gives each process other parameters."""
    model = DistributedDataParallel(network())
    with pytest.raises(ValueError, match=r"'covariance_model'.*ZeroRedundancyOptimizer.*fully_shard"):
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=RFD, covariance_model=COV)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdaptiveRFD)
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(
        RuntimeError, match="process 1 has other tensors than process 0, but AdaptiveRFD decides"
    ):
        optimizer.step(loss=1.0)


def other_tensors_without_names(_):
    p = torch.nn.Parameter(torch.ones(2 + dist.get_rank()))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"process 1 has other tensors.*model.named_parameters\(\)"):
        fitted([p]).step(loss=2.0)


TESTS = {
    2: [
        "observed",
        "missing",
        "joined",
        "joined_without_a_batch",
        "joined_shards",
        "rates_that_differ",
        "networks_that_differ",
        "refused_by_the_library",
        "scales_that_differ",
        "gradients_that_one_lacks",
        "states_of_one",
        "groups_of_one",
        "zero",
        "other_tensors_without_names",
    ],
    3: [
        "observed",
        "joined",
        "joined_without_a_batch",
        "rates_that_differ",
        "networks_that_differ",
        "states_of_one",
    ],
}


@with_gloo
@pytest.mark.parametrize("ranks", TESTS)
def test_processes(ranks, tmp_path):
    spawn(ranks, __name__, TESTS[ranks], tmp_path)


@with_gloo
def test_join_without_the_optimizer(tmp_path):
    spawn(2, __name__, ["joined_without_the_optimizer"], tmp_path)
