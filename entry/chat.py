"""`tercet chat`: turns of a conversation through the checkpoint's chat template."""

from pathlib import Path

import torch
import typer

from tercet.commands import check_room, stream_continuation
from tercet.loading import load_checkpoint_folder
from tercet.training.errors import UserError

Message = dict[str, str]


def run_chat(checkpoint: Path, system: str | None, max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Read a line, answer it, until end of file or /quit."""
    model, tokenizer = load_checkpoint_folder(checkpoint)
    if tokenizer.chat_template is None:
        raise UserError(f"{checkpoint} has no chat template: use `tercet generate` to continue a text")
    if model.generation_config is not None:
        # A turn ends where the template ends it, which a base model's settings do not know.
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        if end is not None and end != tokenizer.unk_token_id:
            model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    typer.echo("Type a message; /reset forgets the conversation, /quit leaves.", err=True)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]).to(
            model.device
        )
        check_room(model, ids.shape[1], max_new_tokens)
        output = stream_continuation(model, tokenizer, ids, max_new_tokens, temperature, top_p)
        answer = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answer})
