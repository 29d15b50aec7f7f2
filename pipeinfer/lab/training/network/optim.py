"""Muon for the matrices, AdamW for the embedding and the norms.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (five Newton-Schulz steps), so
all directions learn at one rate. On a budget of ten million tokens that is worth far more than its
cost of a few percent of a step.

Does not know: schedules, data, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipeinfer.host import multiplies_bfloat16
from pipeinfer.lab.training.minimise import adamw


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Batch [count, rows, columns] -> about the nearest matrices with singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are stepped as one batch."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        super().__init__(
            [{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum}
        )
        self._dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        """Apply one update from the gradients."""
        for group in self.param_groups:
            parameters: list[nn.Parameter] = group["params"]
            updates = []
            for parameter in parameters:
                assert parameter.grad is not None
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
            directions = orthogonalise(torch.stack(updates).to(self._dtype)).float()
            rows, columns = parameters[0].shape
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=-rate)


def make_optimizers(
    model: nn.Module, *, matrix_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Both optimizers."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embd" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embd" in name]
    return [Muon(matrices, lr=matrix_lr), adamw(others, other_lr, fused=True)]
