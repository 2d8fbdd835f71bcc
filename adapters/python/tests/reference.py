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
    as sums over all steps so far.
    """

    DECREASE, NOISY_DECREASE, DECAY, RAMP, WINDOW, SHARE = 0.1, 3.0, 0.9, 8, 16, 0.1
    SMALLEST_VARIANCE, LARGEST_VARIANCE = 0.03, 4.0

    def __init__(self, groups, averaging=0.9, tensorwise=True, loss_bound=0.0):
        """Groups are dicts of `params` and the settings of AdaptiveRFD's groups."""
        defaults = {"lr": 1.0, "weight_decay": 0.0, "length_scale_factor": 1.0}
        self.groups = [{**defaults, **group} for group in groups]
        for group in self.groups:
            group["params"] = [p.detach().to(torch.float64).clone() for p in group["params"]]
        self.averaging, self.tensorwise, self.loss_bound = averaging, tensorwise, loss_bound
        self.losses, self.grads, self.promised = [], [], []

    def average(self, values, decay):
        weights = [decay**k for k in reversed(range(len(values)))]
        return sum(weight * value for weight, value in zip(weights, values)) / sum(weights)

    def trust(self):
        size, factor = self.WINDOW, 1.0
        # The first loss has none before it; a step's promise is about the loss after it.
        differences = [0.0, *(b - a for a, b in zip(self.losses, self.losses[1:]))]
        promised = [0.0, *self.promised]
        windows = [slice(k, k + size) for k in range(0, len(self.losses) - size + 1, size)]
        for before, now in zip(windows, windows[1:]):
            fall = sum(self.losses[before]) - sum(self.losses[now])
            promise = self.SHARE * size * sum(promised[before] + promised[now]) / 2
            noise = math.sqrt(sum(d * d for d in differences[before] + differences[now]) / 2)
            verdict = 0.5 if fall < promise - noise else 1.5 if fall > promise else 1.0
            factor = min(max(factor * verdict, 1e-3), 1.0)
        return factor

    def step(self, loss, grads):
        """One step; `grads` are lists of tensors, one list a group. Returns the learning rate."""
        self.losses.append(loss)
        self.grads.append([g.detach().to(torch.float64).clone() for group in grads for g in group])
        owners = [group for group in self.groups for _ in group["params"]]
        params = [p for group in self.groups for p in group["params"]]
        history = list(zip(*self.grads))
        squares = [self.average([float((g * g).sum()) for g in of], self.DECAY) for of in history]
        averages = [self.average(of, self.averaging) for of in history]
        mean = sum(squares) / sum(p.numel() for p in params)
        bounds = self.SMALLEST_VARIANCE * mean, self.LARGEST_VARIANCE * mean
        variances = [min(max(square / p.numel(), bounds[0]), bounds[1]) for square, p in zip(squares, params)]
        scales = [math.sqrt(mean / variance) if self.tensorwise else 1.0 for variance in variances]
        weights = [group["length_scale_factor"] ** 2 * scale for group, scale in zip(owners, scales)]
        averaged = sum(weight * float((g * g).sum()) for weight, g in zip(weights, averages))
        single = sum(weight * square for weight, square in zip(weights, squares))
        ramp = min(1.0, 2.0 ** (len(self.losses) - self.RAMP))
        rate = min(ramp * self.DECREASE / averaged, self.NOISY_DECREASE / single)
        rate *= self.trust() * (self.average(self.losses, self.averaging) - self.loss_bound)
        self.promised.append(rate * max(group["lr"] for group in self.groups) * averaged)
        for group, p, weight, g in zip(owners, params, weights, averages):
            p.mul_(1 - rate * group["lr"] * group["weight_decay"]).sub_(g, alpha=rate * group["lr"] * weight)
        return rate
