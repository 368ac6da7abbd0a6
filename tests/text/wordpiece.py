"""A small tokenizer of WordPiece."""

import tokenizers
import transformers


def make_wordpiece() -> transformers.PreTrainedTokenizerFast:
    """A vocabulary as BERT has it, which marks what continues a word."""
    kinds = ["[UNK]", "[CLS]", "[SEP]", "the", "dog", "bark", "and", "cat", "sat", "##ed", "##s", ".", ","]
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({kind: n for n, kind in enumerate(kinds)}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.decoders.WordPiece()
    words.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
