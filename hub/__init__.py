"""What a reader of the Hub sees: the model card, filled with what was measured."""

from tercet.hub.card import build_card, check_card, write_card

__all__ = ["build_card", "check_card", "write_card"]
