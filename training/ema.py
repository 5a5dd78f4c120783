"""A running average of the weights, which is often better than the weights themselves (arXiv:2502.06761)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tercet.training.sharding import part_like


class WeightAverage:
    """Exponential moving average of a model's parameters, on their device and sharded as they are.

    After step s, `average += (1 - d) (weight - average)` with `d = min(decay, (1 + s) / (10 + s))`: with the full decay
    from the start, the average would remember the random weights for long. A function of the step alone, so a resumed
    run goes on exactly.

    Args:
        model: Its parameters are averaged; a tied one once.
        decay: Of the average, for large s.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int, is_finite: torch.Tensor) -> None:
        """Take in the weights after a step.

        Args:
            step: Its number, from 1.
            is_finite: Whether it changed the weights, a bool on their device: a step that was left out counts for
                nothing here either, and asking the device which it was would make the host wait for it.
        """
        weight = (1 - min(self.decay, (1 + step) / (10 + step))) * is_finite.float()
        averages = [_here(tensor) for tensor in self.averages.values()]
        parameters = [_here(parameter) for parameter in self._parameters.values()]
        if weight.device.type == "cpu":
            torch._foreach_lerp_(averages, parameters, float(weight))
        else:
            torch._foreach_lerp_(averages, parameters, [weight] * len(averages))

    @torch.no_grad()
    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Go on from whole tensors by parameter name.

        Raises:
            ValueError: They are not of these parameters.
        """
        if averages.keys() != self.averages.keys():
            different = sorted(averages.keys() ^ self.averages.keys())
            raise ValueError(f"averages of other parameters: {different[:3]}")
        for name, own in self.averages.items():
            _here(own).copy_(_here(part_like(averages[name].to(own.device), own)))

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Begin with the weights as they are."""
        torch._foreach_copy_(
            [_here(tensor) for tensor in self.averages.values()],
            [_here(parameter) for parameter in self._parameters.values()],
        )

    @torch.no_grad()
    def put_in(self) -> None:
        """Make the averages the model's weights, for good."""
        torch._foreach_copy_(
            [_here(parameter) for parameter in self._parameters.values()],
            [_here(tensor) for tensor in self.averages.values()],
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages for weights inside, and its own again, to the bit, behind."""
        parameters = [_here(parameter) for parameter in self._parameters.values()]
        with torch.no_grad():
            own = [parameter.clone() for parameter in parameters]
        self.put_in()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: all, or its part; shares memory with it."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()
