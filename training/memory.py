"""What a training step holds, by part: a step of the recipe's own model, loss and optimizers, run without its memory.

The step runs on fake tensors, which have shapes and dtypes but no numbers, and every storage that an operator makes is
counted until Python lets go of it. What autograd saves, what gradient checkpointing recomputes, how large a chunk of
logits is: all of it is the code that trains, and none of it is written down here a second time. What no operator shows
(buffers inside a kernel, the allocator's waste) is a flat part more; what a compiled model spares is not known.

Shapes: B rows of a micro-batch, T sequence_length.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tercet.modeling import TercetConfig, TercetForCausalLM, layers_tercet, linear_tercet, modeling_tercet
from tercet.training.acceleration import checkpoint_blocks
from tercet.training.optimizers import optimizers_of_recipe
from tercet.training.recipe import Recipe


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process, by part.

    Attributes:
        weights: In float32, as they are trained under autocast, too.
        gradients: The same.
        optimizer_state: Two numbers a parameter of AdamW's, one of Muon's.
        ema: A second copy of the weights, where the recipe keeps their average.
        exchange: What several processes add: gradients again in the buckets that are reduced, or, sharded, the weights
            and gradients of the blocks at work and of the embeddings, whole.
        activations: What the forward pass of one micro-batch leaves for the backward pass.
        backward: The most that a backward pass holds beside all of that: gradients of activations, and the weights'
            own as far as they have come before the last activation has gone.
        update: The most that the optimizers hold beside weights, gradients and their state.
        snapshot: The copy that a checkpoint is written from, in the main process's memory, which is the machine's.
        accumulates: Whether gradients of an earlier micro-batch are held while another one's activations are.
        gathered: What sharding makes whole for a moment: embeddings, head and two blocks, and gradients of one.
    """

    weights: int
    gradients: int
    optimizer_state: int
    ema: int
    exchange: int
    activations: int
    backward: int
    update: int
    snapshot: int
    accumulates: bool
    gathered: int

    @property
    def backward_peak(self) -> int:
        """While activations are held."""
        held = self.weights + self.optimizer_state + self.ema + self.exchange
        return held + (self.gradients if self.accumulates else 0) + self.activations + self.backward

    @property
    def update_peak(self) -> int:
        """While the optimizers work; no activation is held then."""
        return self.resident + self.update

    @property
    def slack(self) -> int:
        """What allocator and kernels take beside all that operators show: a twentieth and 64 MiB, as measured."""
        return max(self.backward_peak, self.update_peak) // 20 + (64 << 20)

    @property
    def peak(self) -> int:
        """What the process must have."""
        return max(self.backward_peak, self.update_peak) + self.slack

    @property
    def resident(self) -> int:
        """What is held whatever the micro-batch: below this no batch size fits."""
        return self.weights + self.gradients + self.optimizer_state + self.ema + self.exchange

    def sharded(self, num_processes: int) -> "StepMemory":
        """The same step where so many processes share weights, gradients and states."""
        # Matrices are dealt out for the update, each whole where it is worked on.
        names = ("weights", "gradients", "optimizer_state", "ema", "update")
        parts = {name: -(-getattr(self, name) // num_processes) for name in names}
        return replace(self, **parts, exchange=self.gathered, accumulates=True)

    def to_dict(self) -> dict[str, Any]:
        """Parts and peaks, for JSON."""
        peaks = {name: getattr(self, name) for name in ("backward_peak", "update_peak", "slack", "peak")}
        return {**asdict(self), **peaks}


def step_memory(
    recipe: Recipe, config: TercetConfig, *, num_processes: int = 1, bfloat16: bool = False, on_cpu: bool = True
) -> StepMemory:
    """Count a training step of a recipe. Seconds, whatever the size of the model.

    Args:
        config: Of the model.
        num_processes: World size; with `training.sharding: full` they share weights, gradients and states.
        bfloat16: Autocast, as `training.precision` would choose on the device.
        on_cpu: Whether the device is one.
    """
    training = recipe.training
    is_sharded = num_processes > 1 and training.sharding == "full"
    accumulates = training.global_batch_size > training.per_device_batch_size * num_processes
    # Sharded gradients go as they come, so those of a whole model must not be in the part called backward.
    num_micro_batches = 2 if accumulates or is_sharded else 1
    stand_ins = _as_if_real(own_kernels=on_cpu and not bfloat16)
    with stand_ins, FakeTensorMode(allow_non_fake_inputs=True), MemoryMeter() as meter:
        model = make_step_model(recipe, config)
        optimizers = optimizers_of_recipe(recipe.optimizer, model)
        for _ in range(2):  # the first step makes the optimizers' state
            held = run_step(model, optimizers, _batch(recipe), num_micro_batches, bfloat16=bfloat16, meter=meter)
        weights = sum(p.nbytes for p in model.parameters())
        state = _state_bytes(optimizers)
        # Two blocks are gathered at a time, one at work and the next; embeddings and head stay whole for the pass.
        block = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
        gathered = (_table_bytes(model) + 2 * block) // (2 if bfloat16 else 1) + block
    ema = weights if recipe.optimizer.ema_decay is not None else 0
    one = StepMemory(
        weights=weights,
        gradients=weights,
        optimizer_state=state,
        ema=ema,
        exchange=0,
        snapshot=weights + state + ema,
        accumulates=accumulates,
        gathered=gathered,
        **held,
    )
    if num_processes == 1:
        return one
    return one.sharded(num_processes) if is_sharded else replace(one, exchange=weights)


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of every storage that operators make inside, while it lives.

    Attributes:
        held: Bytes alive now.
        peak: The most since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and take note of what it made."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # There is no number to look at. The model asks whether a gradient is 1, as it is, and whether a mask shows
            # a later token, as none does.
            return False if args[0].dtype is torch.bool else 1.0
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.held

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: weakref.ref) -> None:
            if self._alive.pop(key, None) is not None:
                self.held -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.held += size
        self.peak = max(self.peak, self.held)


@contextmanager
def _as_if_real(*, own_kernels: bool) -> Iterator[None]:
    """Let the model treat fake tensors as it treats real ones: it looks at types, and a fake weight is no Parameter.

    Args:
        own_kernels: Whether blocks run those that they have for float32 training on a CPU.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (linear_tercet, "is_plain_linear", _is_linear),
        (modeling_tercet, "is_plain_linear", _is_linear),
        (layers_tercet, "trains_on_cpu", lambda states: own_kernels and torch.is_grad_enabled()),
    ]
    if own_kernels:
        replaced.append((layers_tercet.TercetRMSNorm, "forward", _norm_by_own_kernel))
    originals = [getattr(place, name) for place, name, _ in replaced]
    for place, name, stand_in in replaced:
        setattr(place, name, stand_in)
    try:
        yield
    finally:
        for (place, name, _), original in zip(replaced, originals, strict=True):
            setattr(place, name, original)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _norm_by_own_kernel(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return layers_tercet.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def make_step_model(recipe: Recipe, config: TercetConfig) -> TercetForCausalLM:
    """The recipe's model as it is trained, on the default device."""
    model = TercetForCausalLM(config).train()
    checkpoint_blocks(model, recipe.training.gradient_checkpointing)
    return model


def run_step(
    model: TercetForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: dict[str, torch.Tensor],
    num_micro_batches: int,
    *,
    bfloat16: bool,
    meter: MemoryMeter,
) -> dict[str, int]:
    """One step; what its last micro-batch and its update held, by part."""
    activations = backward = 0
    for _ in range(num_micro_batches):
        before = meter.held
        meter.restart()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss: Any = model(**batch, num_items_in_batch=torch.ones(()), skip_logits=True, use_cache=False).loss
        activations = meter.held - before
        loss.backward()
        del loss
        backward = meter.peak - before - activations
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    held = meter.held
    meter.restart()
    for optimizer in optimizers:
        optimizer.step()
    update = meter.peak - max(held, meter.held)  # in the first step the state is made, and stays
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return {"activations": activations, "backward": backward, "update": update}


def _batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    shape = (recipe.training.per_device_batch_size, recipe.training.sequence_length)
    return {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "shift_labels", "position_ids")}


def _table_bytes(model: TercetForCausalLM) -> int:
    """Embeddings and head; a tied head counts once."""
    modules = [*(module for module in model.modules() if isinstance(module, torch.nn.Embedding)), model.lm_head]
    return sum(weight.nbytes for weight in {id(module.weight): module.weight for module in modules}.values())


def _state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    entries = (entry for optimizer in optimizers for entry in optimizer.state.values())
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))
