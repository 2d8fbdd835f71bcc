"""The adaptive rule in plain PyTorch, to try changes of it before they are written in Rust."""

import math

import torch


class Prototype(torch.optim.Optimizer):
    """`variances` are of: "elements", "rows and columns", "separable" (columns of the step before), "rows"."""

    def __init__(
        self, params, lr: float = 1.0, weight_decay: float = 0.0, variances: str = "rows", **changes
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.variances = variances
        self.constants = {
            "rate": 0.03, "share": 0.5, "averaging": 0.9, "variance_decay": 0.98, "plateau": 0.03,
            "size": 0.1, "vector": 0.1, "promise": 0.05, "grow": 1.5, "grow_more": 1.2, "most": 4.0,
            "clip": 3.0, "sticky": True, "warmup": 8, "window": 0.0,
        }  # fmt: skip
        unknown = changes.keys() - self.constants.keys()
        if unknown:
            raise ValueError(f"unknown: {unknown}")
        self.constants |= changes
        self.steps = 0
        self.loss = 0.0
        self.trust = 1.0
        self.below_floor = False
        self.before = None  # the last window's sums: losses, squared differences, promises
        self.window = [0.0, 0.0, 0.0]
        self.last_loss = None
        self.count = 0
        self.high = 0
        self.report = {}

    def _average(self, state, name, value, decay, count):
        """An exponential average, corrected for its start."""
        kept = state.setdefault(name, torch.zeros_like(value))
        kept.mul_(decay).add_(value, alpha=1 - decay)
        return kept / (1 - decay**count)

    def _deviation(self, state, g) -> torch.Tensor:
        """√e, whose shape is that of the gradient or broadcasts to it."""
        c = self.constants
        decay, plateau, count = c["variance_decay"], c["plateau"], state["count"]
        if g.dim() < 2:
            return (self._average(state, "rows", (g * g).mean(), decay, count) * (1 + plateau)).sqrt()
        flat = g.reshape(len(g), -1)
        square = flat * flat
        tiny = torch.finfo(g.dtype).tiny
        if self.variances == "elements":
            v = self._average(state, "elements", square, decay, count)
            e = v + plateau * v.mean()
        elif self.variances == "rows":
            v = self._average(state, "rows", square.mean(1, True), decay, count)
            e = v + plateau * v.mean()
        elif self.variances == "rows and columns":
            v = self._average(state, "rows", square.mean(1, True), decay, count)
            columns = self._average(state, "columns", square.mean(0, True), decay, count)
            v = v * (columns + plateau * columns.mean()) / columns.mean().clamp_min(tiny)
            e = v + plateau * v.mean()
        elif self.variances == "separable":
            v = self._average(state, "rows", square.mean(1, True), decay, count)
            lagged = state.get("lagged", torch.ones_like(square[:1]))
            state["lagged"] = self._average(state, "columns", square.mean(0, True), decay, count)
            mean = lagged.mean().clamp_min(tiny)
            e = (v + plateau * v.mean()) * ((lagged + plateau * mean) / mean)
        return e.sqrt().expand_as(flat).reshape(g.shape)

    @torch.no_grad()
    def step(self, loss) -> None:
        c = self.constants
        loss = float(loss)
        self.steps += 1
        n = self.steps
        if loss < 0:
            self.below_floor = True
        bounded = not self.below_floor
        if n > 10 and bounded:
            loss = min(loss, c["clip"] * self.loss / (1 - c["averaging"] ** (n - 1)))
        self.loss = c["averaging"] * self.loss + (1 - c["averaging"]) * loss
        mean_loss = self.loss / (1 - c["averaging"] ** n)
        self._judge(loss)

        moves, squared = [], 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    size = max(p.square().mean().sqrt().item(), 0.01)
                    state["length"] = math.sqrt(c["size"] * size) if p.dim() > 1 else c["vector"]
                    state["count"] = 0
                state["count"] += 1
                g = self._average(state, "momentum", p.grad, c["averaging"], state["count"])
                deviation = self._deviation(state, p.grad)
                direction = torch.where(deviation > 0, g / deviation, 0.0) * (group["lr"] * state["length"])
                squared += (direction * g).sum().item()
                moves.append((p, direction, group["weight_decay"]))
        rate = c["rate"]
        if bounded and squared > 0:
            rate = min(rate, c["share"] * mean_loss / squared)
        rate *= self.trust * 2.0 ** min(0, n - c["warmup"])
        for p, direction, decay in moves:
            p.mul_(1 - 0.1 * rate * decay).sub_(direction, alpha=rate)
        self.window[2] += rate * squared
        self.report = {"loss": mean_loss, "trust": self.trust, "rate": rate, "squared": squared}

    def _judge(self, loss: float) -> None:
        """Trust, from this loss and those before; a window ends before the step that follows its last loss."""
        c = self.constants
        if self.count >= max(16, c["window"] * self.steps):
            losses, squares, promised = self.window
            now = losses / self.count, squares / 2 / self.count**2, promised
            if self.before:
                fall = self.before[0] - now[0]
                noise = math.sqrt(self.before[1] + now[1])
                promise = c["promise"] * (self.before[2] + now[2]) / 2
                if fall < promise - noise:
                    self.trust /= 2
                elif fall > promise:
                    self.trust *= c["grow"] if self.trust < 1 else c["grow_more"]
            self.before, self.window = now, [0.0, 0.0, 0.0]
            self.deviation = math.sqrt(squares / 2 / self.count)
            self.count = 0
        self.count += 1
        if self.last_loss is not None:
            self.window[1] += (loss - self.last_loss) ** 2
        self.window[0] += loss
        self.last_loss = loss
        if self.before:
            high = loss > self.before[0] + 3 * self.deviation
            self.high = self.high + 1 if high else 0
            if self.high == 3:
                self.trust /= 2
                self.high = 0
        self.trust = min(max(self.trust, 0.001), c["most"])
