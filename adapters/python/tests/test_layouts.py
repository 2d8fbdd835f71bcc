"""Shapes, formats and orders in memory: right element by element, or refused; never a silent copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference

from rfdescent import RFD, SquaredExponential

COV = SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=50)
# Half the spacing of numbers between 1 and 2.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@st.composite
def dense(draw):
    """A shape with up to four dimensions, and an order of these in memory."""
    shape = draw(st.lists(st.integers(0, 4) | st.just(1) | st.just(33), max_size=4))
    return shape, draw(st.permutations(range(len(shape))))


def laid_out(values, order):
    """The same elements with the dimensions in another order in memory."""
    result = values.permute(order).contiguous().permute([order.index(k) for k in range(len(order))])
    assert result.shape == values.shape
    return result


def check(params, grads, momentum):
    reference = Reference([{"params": params, "momentum": momentum, "weight_decay": 0.01}], COV)
    addresses = [p.data_ptr() for p in params]
    copies = [g.clone() for g in grads]
    optimizer = RFD(params, covariance_model=COV, momentum=momentum, weight_decay=0.01)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    for _ in range(2):
        optimizer.step(loss=2.5)
        if optimizer.report.outcome == "zero_gradient":
            assert not any(g.any() for g in grads)
            return
        reference.step(2.5, [grads])
    assert [p.data_ptr() for p in params] == addresses
    assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    for p, e in zip(params, reference.groups[0]["params"], strict=True):
        if p.numel():
            # Two steps: each rounds the parameter, the update and its factors to the format (at least
            # float32).
            largest = max(1.0, float(e.abs().max()), 2 * COV.plateau_step_size / (1 - momentum))
            assert (p.detach().double() - e).abs().max() <= 8 * ROUNDING[p.dtype] * largest


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(dense(), st.sampled_from(list(ROUNDING))), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 2**31),
)
def test_dense_layouts(tensors, momentum, seed):
    generator = torch.Generator().manual_seed(seed)
    params, grads = [], []
    for (shape, order), dtype in tensors:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        params.append(torch.nn.Parameter(laid_out(values.to(dtype), order)))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        grads.append(laid_out(values.to(dtype), order))
    check(params, grads, momentum)


@given(dense(), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_views_into_larger_memory(layout, start, more):
    shape, order = layout
    size = torch.Size(shape).numel()

    def inside(values):
        memory = torch.full((start + size + more,), 7.0)
        view = (
            memory[start : start + size]
            .view([shape[k] for k in order])
            .permute([order.index(k) for k in range(len(order))])
        )
        view.copy_(values)
        return memory, view

    generator = torch.Generator().manual_seed(size)
    memory, param = inside(torch.randn(shape, generator=generator))
    grad_memory, grad = inside(torch.randn(shape, generator=generator))
    check([torch.nn.Parameter(param)], [grad], 0.5)
    for outer in (memory, grad_memory):
        assert (outer[:start] == 7).all()
        assert (outer[start + size :] == 7).all()


def test_channels_last():
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    optimizer = RFD(model.parameters(), covariance_model=COV, momentum=0.5)
    reference = Reference([{"params": list(model.parameters()), "momentum": 0.5}], COV)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        assert model.weight.grad.stride() == model.weight.stride()
        reference.step(2.5, [[p.grad for p in model.parameters()]])
        optimizer.step(loss=2.5)
    for p, e in zip(model.parameters(), reference.groups[0]["params"], strict=True):
        assert (p.detach().double() - e).abs().max() <= 24 * ROUNDING[torch.float32] * float(e.abs().max())
    velocity = optimizer.state_dict()["state"][0]["velocity"]
    assert torch.allclose(velocity, reference.groups[0]["velocities"][0].float(), rtol=1e-5)


def test_size_one_dimensions_may_have_any_stride():
    p = torch.nn.Parameter(torch.zeros(4).as_strided((2, 1, 2), (2, 77, 1)))
    p.grad = torch.arange(4.0).as_strided((2, 1, 2), (2, 5, 1))
    RFD([p], covariance_model=COV).step(loss=2.5)
    assert p.flatten()[0] == 0
    assert (p.flatten()[1:] < 0).all()


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(3, 4)[:, :2], r"strides \(4, 1\), which leave gaps or overlap.*contiguous\(\)"),
        (torch.zeros(3, 4)[:, ::2], "gaps or overlap"),
        (torch.zeros(1).expand(5), "gaps or overlap"),
        (torch.zeros(6).as_strided((2, 3), (2, 1)), "gaps or overlap"),
        (torch.zeros(3, dtype=torch.complex64), "complex64.*view_as_real"),
        (torch.zeros(3, dtype=torch.float8_e5m2), "float8_e5m2; supported are"),
        (torch.zeros(3, 3).to_sparse(), r"sparse.*to_dense\(\)"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "is nested"),
    ],
)
def test_refused_parameters(param, message):
    with pytest.raises(ValueError, match=f"tensor `weight`.*{message}"):
        RFD([("weight", param.requires_grad_())], covariance_model=COV)


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.arange(6, dtype=dtype).view(3, 2).t(),
        lambda dtype: torch.ones(1, dtype=dtype).expand(2, 3),
        lambda dtype: torch.arange(12, dtype=dtype).view(2, 6)[:, ::2],
        lambda _: torch.complex(torch.zeros(2, 3), torch.ones(2, 3)).conj().imag,
    ],
    ids=["transposed", "expanded", "with gaps", "lazily negated"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_copied(make, dtype):
    """With one warning; they stay as they are."""
    grad = make(dtype)
    fine, p = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 3, dtype=grad.dtype))
    reference = Reference([{"params": [fine, p]}], COV)
    optimizer = RFD([("fine", fine), ("weight", p)], covariance_model=COV)
    fine.grad, p.grad = torch.ones(2), grad
    before, strides = grad.clone(), grad.stride()
    with pytest.warns(
        UserWarning, match="the gradient of tensor `weight` lies in memory in another order"
    ) as got:
        for _ in range(2):
            optimizer.step(loss=2.5)
            reference.step(2.5, [[fine.grad, grad]])
    assert len([w for w in got if "another order" in str(w.message)]) == 1
    assert p.grad is grad
    assert torch.equal(grad, before)
    assert grad.stride() == strides
    for q, e in zip((fine, p), reference.groups[0]["params"], strict=True):
        # As in `check`, of two steps.
        assert (q.detach().double() - e).abs().max() <= 8 * ROUNDING[q.dtype] * max(1.0, float(e.abs().max()))
    # Others that lie well follow.
    p.grad = torch.ones_like(p)
    optimizer.step(loss=2.5)
    assert optimizer.report.grad_norm == pytest.approx(8**0.5, rel=1e-12)


def test_channels_last_gradients_of_a_contiguous_parameter():
    p = torch.nn.Parameter(torch.zeros(4, 3, 2, 2))
    grad = torch.randn(4, 3, 2, 2)
    p.grad = grad.contiguous(memory_format=torch.channels_last)
    optimizer = RFD([p], covariance_model=COV)
    with pytest.warns(UserWarning, match="channels_last"):
        optimizer.step(loss=2.5)
    rate = optimizer.report.learning_rate
    assert torch.allclose(p, -rate * grad, rtol=4 * ROUNDING[torch.float32])


def test_refused_gradients():
    fine, p = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RFD([("fine", fine), ("weight", p)], covariance_model=COV)
    fine.grad, p.grad = torch.ones(2), torch.ones(2, 3).to_sparse()
    with pytest.raises(ValueError, match="tensor `weight`.*gradient is torch.sparse_coo.*sparse=False"):
        optimizer.step(loss=2.5)
    assert (fine == 1).all()
    assert (p == 1).all()
    # The remedy of the message.
    p.grad = p.grad.to_dense()
    optimizer.step(loss=2.5)
    assert (p < 1).all()


def test_sparse_embedding():
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = RFD(model.named_parameters(), covariance_model=COV)
    model(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError, match="`weight`: its gradient is torch.sparse_coo"):
        optimizer.step(loss=2.5)


def test_gradients_of_another_format():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    p.grad = torch.tensor([1.0, 2.0, 2.0, 4.0])
    optimizer = RFD([p], covariance_model=COV)
    optimizer.step(loss=2.5)
    assert optimizer.report.grad_norm == 5.0
    p.grad = None
    p.grad_dtype = torch.bfloat16
    p.grad = torch.tensor([0, 0, 2.0, 0], dtype=torch.bfloat16)
    optimizer.step(loss=2.5)
    assert optimizer.report.grad_norm == 2.0


def replaced(change, grad, **options):
    """A parameter of ones whose data is replaced after a step, at the same address, and its optimizer."""
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = RFD([("weight", p)], covariance_model=COV, **options)
    p.grad = torch.ones(4, 4)
    optimizer.step(loss=2.5)
    address, p.grad = p.data_ptr(), None
    p.data = change(p.data)
    assert p.data_ptr() == address
    p.data.fill_(1)
    p.grad = grad
    return p, optimizer


@pytest.mark.parametrize(
    ("change", "grad"),
    [
        (lambda data: data[:2], torch.arange(8.0).view(2, 4)),
        (lambda data: data.view(-1), torch.arange(16.0)),
        (lambda data: data.view(2, 8), torch.arange(16.0).view(2, 8)),
        (lambda data: data.t(), torch.arange(16.0).view(4, 4).t()),
        # The strides stay, the sizes do not.
        (lambda data: data.view(-1)[:4].as_strided((1, 4), (4, 1)), torch.arange(4.0).view(1, 4)),
        (lambda data: data.view(torch.float16), torch.arange(32.0).view(4, 8).half()),
    ],
)
def test_data_replaced_at_the_same_address(change, grad):
    p, optimizer = replaced(change, grad)
    reference = Reference([{"params": [p]}], COV)
    optimizer.step(loss=2.5)
    reference.step(2.5, [[grad]])
    assert optimizer.report.grad_norm == pytest.approx(float(grad.double().norm()), rel=1e-12)
    expected = reference.groups[0]["params"][0]
    # Of one step: the parameter and its update are rounded.
    error = (p.detach().double() - expected).abs().max()
    assert error <= 2 * ROUNDING[p.dtype] * max(1.0, float(expected.abs().max()))


def test_a_large_parameter_cut_to_a_few_elements():
    """What the library would read beyond them is memory that is gone."""
    p = torch.nn.Parameter(torch.ones(4_000_000))
    optimizer = RFD([p], covariance_model=COV)
    p.grad = torch.ones_like(p)
    optimizer.step(loss=2.5)
    p.grad = None
    p.data = p.data[:10]
    p.grad = torch.ones(10)
    optimizer.step(loss=2.5)
    assert optimizer.report.grad_norm == pytest.approx(10**0.5, rel=1e-12)


def test_gradients_that_a_parameter_has_outgrown():
    grad = torch.arange(16.0).view(4, 4)
    p, optimizer = replaced(lambda data: data.t(), grad)
    with pytest.warns(UserWarning, match="the gradient of tensor `weight` lies in memory in another order"):
        optimizer.step(loss=2.5)
    assert torch.allclose(p, 1 - optimizer.report.learning_rate * grad)
    p, optimizer = replaced(lambda data: data, torch.ones(4, 4))
    optimizer.step(loss=2.5)
    before = p.data = p.data[:2]
    with pytest.raises(ValueError, match=r"shape \(2, 4\) but its gradient \(4, 4\); set param.grad = None"):
        optimizer.step(loss=2.5)
    assert torch.equal(p, before)


def test_a_lazily_negated_gradient_after_others():
    """Of a parameter without dimensions, whose strides do not tell."""
    p = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = RFD([("scale", p)], covariance_model=COV)
    p.grad = torch.tensor(1.0)
    optimizer.step(loss=2.5)
    before = p.item()
    p.grad = torch.complex(torch.tensor(0.0), torch.tensor(1.0)).conj().imag
    assert p.grad.is_neg()
    with pytest.warns(UserWarning, match="the gradient of tensor `scale`"):
        optimizer.step(loss=2.5)
    assert p.item() > before
