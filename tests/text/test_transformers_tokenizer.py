"""The bytes of tokens, joined, are the text that they were made from."""

import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from regard.text import BytePair
from regard.text.byte_pair import GPT2_FOLDER
from regard.text.transformers_tokenizer import PromptTokenizer, TransformersTokenizer
from text.wordpiece import make_wordpiece

OF_BYTES = TransformersTokenizer(
    transformers.GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
)


@given(st.text(max_size=40))
def test_tokens_of_bytes_are_those_of_the_same_vocabulary(text):
    ids = OF_BYTES.encode(text)
    assert ids == BytePair.gpt2().encode(text)
    assert OF_BYTES.bytes(ids) == BytePair.gpt2().bytes(ids) == text.encode()
    assert OF_BYTES.pieces(ids) == BytePair.gpt2().pieces(ids)


def test_a_token_that_was_added_is_its_name_and_no_bytes():
    """Its letters may be those that stand for bytes in the pieces of the vocabulary."""
    own = transformers.GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    own.add_tokens(["na\u00efve", "\u00abs\u00bb"])
    found, text = TransformersTokenizer(own), "a na\u00efve \u00abs\u00bb caf\u00e9"
    assert len(own) == 50259
    assert {50257, 50258} <= {*found.encode(text)}
    assert found.bytes(found.encode(text)) == text.encode()


def test_pieces_of_sentencepiece_have_spaces_letters_and_single_bytes():
    vocabulary = {"<unk>": 0, "\u2581the": 1, "\u2581caf\u00e9": 2, "<0xE2>": 3, "<0x98>": 4, "<0x83>": 5}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    found = TransformersTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model)))
    assert found.bytes([1, 2, 3, 4, 5]).decode() == " the caf\u00e9\u2603"
    assert found.pieces([2, 3]) == [" caf\u00e9", "\\xe2"]


def test_pieces_of_wordpiece_join_to_the_text_that_its_own_decoder_writes():
    words = make_wordpiece()
    found, text = TransformersTokenizer(words), "the dog barked, and the cats sat."
    ids = found.encode(text)
    assert "##ed" in words.convert_ids_to_tokens(ids)
    assert found.bytes(ids).decode() == " " + words.decode(ids) == " " + text
    assert found.pieces(found.encode("dogs [SEP].")) == [" dog", "s", " [SEP]", "."]


def test_a_prompt_begins_as_every_text_does_once_and_has_no_end():
    own = transformers.GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    own.bos_token = "!"
    found, start, end = PromptTokenizer(own), own.bos_token_id, own.eos_token_id
    assert (found.encode(""), found.encode("the cat")) == ([start], OF_BYTES.encode("the cat"))
    own.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "! $A <|endoftext|>", special_tokens=[("!", start), ("<|endoftext|>", end)]
    )
    assert found.beginning == [start]
    assert (found.encode(""), found.encode("the cat")) == ([start], [start, *OF_BYTES.encode("the cat")])
    assert found.encode("!the cat") == [start, *OF_BYTES.encode("the cat")]
    own.bos_token = own.eos_token = None
    own.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A", special_tokens=[])
    assert found.encode("") == []
