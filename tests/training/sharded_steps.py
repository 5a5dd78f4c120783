"""Run under torchrun: a sharded model beside a whole one, step by step. Process 0 saves what both came to."""

import sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.optimizers import make_optimizers
from tercet.training.sharding import part_like, shard_model, whole, whole_model
from tercet.training.step import training_step

STEPS, ROWS, TOKENS, MICRO_BATCHES, CLIP_NORM = 3, 12, 16, 2, 0.5


def make_model() -> TercetForCausalLM:
    # Sizes that two processes do not divide: 301 rows, 41 rows, one down_proj.
    torch.manual_seed(0)
    return TercetForCausalLM(
        TercetConfig.modern(
            vocab_size=301, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
            intermediate_size=41,
        )
    ).train()  # fmt: skip


def make_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 301, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ROWS, TOKENS, generator=generator) < 0.4] = -100  # every process has another number of them
    return {"input_ids": ids, "shift_labels": labels}


def step_alone(model, optimizers, batch) -> tuple[float, float]:
    """The step as a textbook has it: one batch, one process."""
    num_tokens = (batch["shift_labels"] != -100).sum()
    loss = model(**batch, num_items_in_batch=num_tokens, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss), float(norm)


def main(name: str, output: str) -> None:
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    settings = {
        "name": name, "learning_rate": 1e-2, "matrix_learning_rate": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95),
    }  # fmt: skip
    alone, sharded = make_model(), make_model()
    shard_model(sharded, accelerator)
    found = {"tied": sharded.lm_head.weight is sharded.get_input_embeddings().weight, "losses": [], "norms": []}
    of_alone, of_sharded = make_optimizers(alone, **settings), make_optimizers(sharded, **settings)
    for index in range(STEPS):
        batch = make_batch(index)
        loss, norm = step_alone(alone, of_alone, batch)
        mine = {key: value[rank::size] for key, value in batch.items()}
        parts = [{key: value[part::MICRO_BATCHES] for key, value in mine.items()} for part in range(MICRO_BATCHES)]
        result = training_step(sharded, of_sharded, parts, accelerator, clip_norm=CLIP_NORM)
        found["losses"].append((loss, float(result.loss_nats)))
        found["norms"].append((norm, float(result.grad_norm)))
    found["alone"] = {key: value.detach() for key, value in alone.named_parameters()}
    found["sharded"] = {key: whole(value.detach()) for key, value in sharded.named_parameters()}
    back = [part_like(found["sharded"][key], value) for key, value in sharded.named_parameters()]
    found["parts"] = all(
        torch.equal(one.to_local(), two.to_local()) for one, two in zip(back, sharded.parameters(), strict=True)
    )

    # After a forward without gradients, every weight is a shard again.
    with torch.no_grad():
        sharded(make_batch(0)["input_ids"], use_cache=False)
    found["kinds"] = sorted({type(parameter).__name__ for parameter in sharded.parameters()})
    before = torch.get_rng_state()
    copied = whole_model(sharded, here=rank == 0)
    found["random_state_kept"] = torch.equal(before, torch.get_rng_state())
    assert (copied is None) == (rank != 0)
    if copied is not None:
        copied.save_pretrained(f"{output}-{name}")
        prompt = make_batch(0)["input_ids"][:1, :4]
        found["generated"] = [
            model.eval().generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=-1)
            for model in (copied, alone)
        ]
        found["class"] = type(copied).__name__
        torch.save(found, f"{output}-{name}.pt")
    accelerator.wait_for_everyone()


def in_bfloat16(output: str) -> None:
    """Blocks compute in bfloat16; what is counted, kept and summed does not."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    shard_model(model, SimpleNamespace(num_processes=accelerator.num_processes, device=accelerator.device,
                                       mixed_precision="bf16"))  # fmt: skip
    seen = set()
    model.model.layers[0].register_forward_hook(lambda module, inputs, result: seen.add(str(result.dtype)))
    losses = []
    for num_tokens in (1, 1001):  # bfloat16 has no 1001
        loss = model(**make_batch(0), num_items_in_batch=torch.tensor(float(num_tokens)), skip_logits=True,
                     use_cache=False).loss  # fmt: skip
        losses.append(float(loss))
    loss.backward()
    kinds = {str(parameter.dtype) for parameter in model.parameters()}
    kinds |= {str(parameter.grad.dtype) for parameter in model.parameters()}
    if accelerator.is_main_process:
        torch.save({"blocks": sorted(seen), "kept": sorted(kinds), "losses": losses}, f"{output}-bfloat16.pt")


if __name__ == "__main__":
    in_bfloat16(sys.argv[1])
    for optimizer_name in ("adamw", "muon"):
        main(optimizer_name, sys.argv[1])
    torch.distributed.destroy_process_group()
