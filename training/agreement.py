"""What all processes of a run decide alike, so that none waits in a collective that another has left."""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""For a process that hangs; one that dies is noticed at once by the lifeline. Long enough for the main process to
evaluate, to sample or to write on a slow disk while the others wait."""


class Agreement:
    """Numbers exchanged between processes over the CPU: no device has to finish its work for it.

    Args:
        accelerator: Its processes; all of them make an Agreement, at the same place.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._group: dist.ProcessGroup | None = None
        self._is_alone = accelerator.num_processes == 1
        if not self._is_alone and dist.get_backend() != "gloo":
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all processes; every process gives as many and calls this."""
        if self._is_alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def text_of_main(self, text: str) -> str:
        """The main process's text, in every process."""
        if self._is_alone:
            return text
        size = self.largest([len(text.encode()) if dist.get_rank() == 0 else 0])[0]
        tensor = torch.zeros(size, dtype=torch.uint8)
        if dist.get_rank() == 0 and size:
            tensor = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self._group)
        return bytes(tensor.tolist()).decode()
