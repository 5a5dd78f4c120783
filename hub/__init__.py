"""What a reader of the Hub sees: the model card, filled with what was measured, and the checkpoint, published."""

from tercet.hub.card import build_card, check_card, write_card
from tercet.hub.options import PushOptions
from tercet.hub.push import PushReport, push_checkpoint

__all__ = ["PushOptions", "PushReport", "build_card", "check_card", "push_checkpoint", "write_card"]
