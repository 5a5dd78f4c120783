"""Byte-level BPE trained on your own text, in the format that `AutoTokenizer` loads with no custom code.

Every Unicode string comes back as it went in, and the ids are those of the saved `tokenizer.json` in any runtime.
"""

from tercet.tokenizer.encoding import bytes_per_token, encode_documents
from tercet.tokenizer.report import ReportText, SourceFigures, TokenizerReport, make_report
from tercet.tokenizer.sampling import SampleCounts, TextSampler
from tercet.tokenizer.special_tokens import (
    END_OF_TEXT,
    MESSAGE_END,
    MESSAGE_START,
    PADDING,
    SPECIAL_TOKENS,
    TokenIds,
    special_ids,
    token_ids,
)
from tercet.tokenizer.training import MIN_VOCAB_SIZE, VocabularyTooLargeError, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "MESSAGE_END",
    "MESSAGE_START",
    "MIN_VOCAB_SIZE",
    "PADDING",
    "SPECIAL_TOKENS",
    "ReportText",
    "SampleCounts",
    "SourceFigures",
    "TextSampler",
    "TokenIds",
    "TokenizerReport",
    "VocabularyTooLargeError",
    "bytes_per_token",
    "encode_documents",
    "make_report",
    "special_ids",
    "token_ids",
    "train_tokenizer",
]
