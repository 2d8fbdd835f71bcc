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
