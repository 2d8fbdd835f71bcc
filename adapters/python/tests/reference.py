"""RFD with the squared exponential covariance in plain float64, straight from the paper's formulas."""

import math

import torch


def step_size(cov, loss, norm, b_size_inv=0.0):
    """S-RFD's step for a squared exponential covariance; theorem 5.2 with the corrections of section 6."""
    if loss >= cov.mean:
        loss = cov.mean
    shrink = cov.var_reg.intercept / cov.var_reg(b_size_inv)
    grad_shrink = cov.g_var_reg.intercept / cov.g_var_reg(b_size_inv)
    scale_sq = cov.var_reg.intercept * cov.dims / cov.g_var_reg.intercept
    half = shrink * (cov.mean - loss) / 2
    slope = grad_shrink * norm
    return scale_sq * slope / (half + math.sqrt(half * half + scale_sq * slope * slope))


class Reference:
    """Takes steps on float64 copies of parameters."""

    def __init__(self, groups, cov, b_size_inv=0.0):
        """Groups are dicts of `params` and the settings of RFD's groups."""
        defaults = {
            "lr": 1.0,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "length_scale_factor": 1.0,
            "norm_lock": False,
        }
        self.groups = [{**defaults, **group} for group in groups]
        for group in self.groups:
            group["params"] = [p.detach().to(torch.float64).clone() for p in group["params"]]
            group["velocities"] = [torch.zeros_like(p) for p in group["params"]]
        self.cov, self.b_size_inv = cov, b_size_inv

    def step(self, loss, grads):
        """One step; `grads` are lists of tensors, one list a group."""
        grads = [[g.detach().to(torch.float64) for g in group] for group in grads]
        squares = [sum(float((g * g).sum()) for g in group) for group in grads]
        sigma = math.sqrt(
            sum(group["length_scale_factor"] ** 2 * s for group, s in zip(self.groups, squares))
        )
        rate = step_size(self.cov, loss, sigma, self.b_size_inv) / sigma
        for group, group_grads in zip(self.groups, grads):
            factor = group["lr"] * group["length_scale_factor"] ** 2
            for p, v, g in zip(group["params"], group["velocities"], group_grads):
                before = p.norm()
                v.mul_(group["momentum"]).sub_(g)
                p.mul_(1 - rate * group["lr"] * group["weight_decay"]).add_(v, alpha=rate * factor)
                if group["norm_lock"] and p.numel() > 1 and before > 0:
                    p.mul_(before / p.norm())
        return rate


class AdaptiveReference:
    """The adaptive method on float64 copies of parameters, rule by rule from docs/adaptive.md, with averages
    as sums over all steps so far. For tensors so small that all rows tell of columns, none of which is cut.
    """

    LARGEST_RATE, LOSS_SHARE, FLOOR, DECAY = 0.03, 0.5, 0.03, 0.98
    RAMP, WINDOW, SHARE, SETTLED = 8, 16, 0.05, 10

    def __init__(self, groups, averaging=0.85, loss_bound=None):
        """Groups are dicts of `params` and the settings of AdaptiveRFD's groups."""
        defaults = {"lr": 1.0, "weight_decay": 0.0, "length_scale_factor": 1.0}
        self.groups = [{**defaults, **group} for group in groups]
        for group in self.groups:
            group["params"] = [p.detach().to(torch.float64).clone() for p in group["params"]]
            group["lengths"] = [
                math.sqrt(0.1 * max(float(p.square().mean().sqrt()), 0.01 if p.dim() > 1 else 0.1))
                for p in group["params"]
            ]
        self.averaging, self.loss_bound = averaging, loss_bound
        # The losses as given and as they count.
        self.losses, self.counted, self.grads, self.promised = [], [], [], []
        self.cut = 0

    def average(self, values, decay):
        weights = [decay**k for k in reversed(range(len(values)))]
        return sum(weight * value for weight, value in zip(weights, values)) / sum(weights)

    def bound(self):
        """Below the losses so far; None where none is known."""
        if self.loss_bound is not None:
            return self.loss_bound
        return None if any(loss < 0 for loss in self.losses) else 0.0

    def window(self, number):
        """Sum of the losses of a window, of their squared differences, and of what was promised."""
        steps = range(self.WINDOW * number, self.WINDOW * (number + 1))
        # The first loss has none before it; a step's promise is about the loss after it.
        differences = [self.counted[k] - self.counted[k - 1] for k in steps if k > 0]
        promised = sum(self.promised[k - 1] for k in steps if k > 0)
        return sum(self.counted[k] for k in steps), sum(d * d for d in differences), promised

    def observe(self, loss):
        """Notes a loss, and what it counts as."""
        bound, steps = self.bound(), len(self.losses)
        most = math.inf
        if steps >= self.SETTLED:
            average = self.average(self.counted, self.averaging)
            if bound is not None and average > bound:
                most = average + 2 * (average - bound)
            elif bound is None and steps >= self.WINDOW:
                _, squares, _ = self.window(steps // self.WINDOW - 1)
                most = average + 10 * math.sqrt(squares / (2 * self.WINDOW))
        # More than three in a row are no outliers.
        self.cut = self.cut + 1 if loss > most else 0
        self.losses.append(loss)
        self.counted.append(loss if self.cut > 3 else min(loss, most))

    def trust(self):
        size, factor, high = self.WINDOW, 1.0, 0
        for k, loss in enumerate(self.counted):
            if k % size == 0:
                high = 0
            if k >= size and high < 3:
                total, squares, _ = self.window(k // size - 1)
                high = high + 1 if loss > total / size + 3 * math.sqrt(squares / (2 * size)) else 0
                if high == 3:
                    factor = max(factor / 2, 1e-3)
            if k >= 2 * size - 1 and k % size == size - 1:
                before, now = self.window(k // size - 1), self.window(k // size)
                fall, noise = before[0] - now[0], math.sqrt((before[1] + now[1]) / 2)
                promise = self.SHARE * size * (before[2] + now[2]) / 2
                if promise and fall < promise - noise:
                    factor /= 2
                elif promise and fall > promise:
                    factor *= 1.5
                factor = min(max(factor, 1e-3), 4.0)
        return factor

    def scales(self, grads):
        """What the elements of a tensor are scaled with, by all its gradients so far: 1/√e."""
        rows = [g.square().reshape(g.shape[0] if g.dim() > 1 else 1, -1) for g in grads]
        before = rows[:-1]
        mean = self.average([r.mean() for r in before], self.DECAY) if before else 0.0
        e = (self.average([r.mean(1, keepdim=True) for r in rows], self.DECAY) + self.FLOOR * mean).sqrt()
        if before and grads[0].dim() > 1:
            columns = self.average([r.mean(0, keepdim=True) for r in before], self.DECAY)
            e = e * ((columns + self.FLOOR * mean) / mean).sqrt()
        return (1 / e).expand_as(rows[0]).reshape(grads[0].shape)

    def step(self, loss, grads):
        """One step; `grads` are lists of tensors, one list a group. Returns the learning rate."""
        self.observe(loss)
        self.grads.append([g.detach().to(torch.float64).clone() for group in grads for g in group])
        owners = [group for group in self.groups for _ in group["params"]]
        params = [p for group in self.groups for p in group["params"]]
        lengths = [length for group in self.groups for length in group["lengths"]]
        history = list(zip(*self.grads))
        averages = [self.average(of, self.averaging) for of in history]
        largest = max(group["lr"] for group in self.groups)
        weights = [
            group["lr"] / largest * group["length_scale_factor"] ** 2 * length * self.scales(of)
            for group, length, of in zip(owners, lengths, history)
        ]
        squared = sum(float((weight * g * g).sum()) for weight, g in zip(weights, averages))
        bound, ramp = self.bound(), min(1.0, 2.0 ** (len(self.losses) - self.RAMP))
        rate = self.LARGEST_RATE
        if bound is not None:
            left = max(self.average(self.counted, self.averaging) - bound, 0)
            rate = min(rate, self.LOSS_SHARE * left / squared)
        rate *= self.trust() * ramp * largest
        self.promised.append(rate * squared)
        for group, p, weight, g in zip(owners, params, weights, averages):
            decay = 0.1 * rate * group["lr"] / largest * group["weight_decay"]
            p.mul_(1 - decay).sub_(weight * g, alpha=rate)
        return rate
