"""The adaptive rule (docs/adaptive.md) in plain PyTorch: changes are tried here before they are written."""

import math

import torch


class Prototype(torch.optim.Optimizer):
    """`variances` are "separable" (rows, and columns of the steps before), of "rows", or of "elements"."""

    def __init__(self, params, lr: float = 1.0, weight_decay: float = 0.0, **changes):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.constants = {
            "variances": "separable",
            "rate": 0.03,
            "share": 0.5,
            "averaging": 0.85,
            "variance_decay": 0.98,
            "floor": 0.03,
            "size": 0.1,
            "smallest_matrix": 0.01,
            "smallest_vector": 0.1,
            "window": 16,
            "promise": 0.05,
            "less": 0.5,
            "more": 1.5,
            "largest_trust": 4.0,
        }
        unknown = changes.keys() - self.constants.keys()
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: none of {', '.join(self.constants)}")
        self.constants |= changes
        self.steps, self.loss, self.below, self.trust = 0, 0.0, False, 1.0
        self.last = self.before = None  # the loss before, the sums of the window before
        self.window = [0.0, 0.0, 0.0]  # losses, squared differences of successive ones, promises
        self.high = self.judged = self.cut = 0
        self.alarmed = False  # in this window
        self.report = {}

    def _average(self, state, name, value) -> torch.Tensor:
        """An exponential average, corrected for its start; of this step's and earlier values."""
        decay = self.constants["averaging" if name == "momentum" else "variance_decay"]
        kept = state.setdefault(name, torch.zeros_like(value))
        kept.mul_(decay).add_(value, alpha=1 - decay)
        return kept / (1 - decay ** state["count"])

    def _weights(self, state, g) -> torch.Tensor:
        """1/√e for each element; 0 where nothing has been seen."""
        kind, floor = self.constants["variances"], self.constants["floor"]
        square = (g * g).reshape(len(g), -1) if g.dim() > 1 else (g * g).reshape(1, -1)
        if kind == "elements" and g.dim() > 1:
            variance = self._average(state, "elements", square)
            variance = variance + floor * variance.mean()
        else:
            rows = self._average(state, "rows", square.mean(1, True))
            variance = rows + floor * state.get("mean", 0.0)
            state["mean"] = rows.mean()
        if kind == "separable" and g.dim() > 1:
            columns = state.get("columns before", torch.ones_like(square[:1]))
            state["columns before"] = self._average(state, "columns", square.mean(0, True))
            mean = columns.mean()
            if mean > 0:
                variance = variance * (columns + floor * mean) / mean
        weights = torch.where(variance > 0, variance.rsqrt(), 0.0)
        return weights.expand_as(square).reshape(g.shape)

    def _counted(self, loss: float) -> float:
        """The loss, cut where it is far above the average, unless those before it were."""
        most = math.inf
        if self.steps > 10:
            average = self.loss / (1 - self.constants["averaging"] ** (self.steps - 1))
            if not self.below:
                most = 3 * average if average > 0 else math.inf
            elif self.before:
                most = average + 10 * self._deviation()
        self.cut = self.cut + 1 if loss > most else 0
        return loss if self.cut > 3 else min(loss, most)

    @torch.no_grad()
    def step(self, loss) -> None:
        c = self.constants
        self.steps += 1
        loss = self._counted(float(loss))
        self.below = self.below or loss < 0
        self.loss = c["averaging"] * self.loss + (1 - c["averaging"]) * loss
        average = self.loss / (1 - c["averaging"] ** self.steps)
        self._judge(loss)

        moves, squared = [], 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    smallest = c["smallest_matrix" if p.dim() > 1 else "smallest_vector"]
                    state["length"] = math.sqrt(c["size"] * max(p.square().mean().sqrt().item(), smallest))
                    state["count"] = 0
                state["count"] += 1
                g = self._average(state, "momentum", p.grad)
                direction = g * self._weights(state, p.grad) * (group["lr"] * state["length"])
                squared += (direction * g).sum().item()
                moves.append((p, direction, group["weight_decay"]))
        rate = c["rate"]
        if not self.below and squared > 0:
            rate = min(rate, c["share"] * max(average, 0) / squared)
        rate *= self.trust * 2.0 ** min(0, self.steps - 8)
        for p, direction, decay in moves:
            p.mul_(1 - 0.1 * rate * decay).sub_(direction, alpha=rate)
        self.window[2] += rate * squared
        self.report = {"loss": average, "trust": self.trust, "rate": rate, "squared": squared}

    def _deviation(self) -> float:
        """Of a single loss in the window before."""
        return math.sqrt(self.before[1] / (2 * self.constants["window"]))

    def _judge(self, loss: float) -> None:
        """Trust, after one more loss."""
        c = self.constants
        if self.before:
            high = loss > self.before[0] / c["window"] + 3 * self._deviation()
            self.high = self.high + 1 if high else 0
            if self.high >= 3 and not self.alarmed:
                self.alarmed = True
                self.trust *= c["less"]
        self.window[0] += loss
        self.window[1] += 0 if self.last is None else (loss - self.last) ** 2
        self.last = loss
        self.judged += 1
        if self.judged == c["window"]:
            losses, squares, promised = self.window
            if self.before:
                fall = self.before[0] - losses
                promise = c["promise"] * c["window"] * (self.before[2] + promised) / 2
                noise = math.sqrt((self.before[1] + squares) / 2)
                if fall < promise - noise:
                    self.trust *= c["less"]
                elif fall > promise:
                    self.trust *= c["more"]
            self.before, self.window, self.judged, self.alarmed = self.window, [0.0, 0.0, 0.0], 0, False
        self.trust = min(max(self.trust, 0.001), c["largest_trust"])
