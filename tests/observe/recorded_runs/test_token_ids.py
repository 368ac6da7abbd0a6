"""The ids that a run read, against those that were given to the model, and the words that tokenizers have for them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bart.modeling_bart import shift_tokens_right

from regard import ConfigError, load, record

VOCABULARY = 53
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
WRITE = {"max_new_tokens": 5, "do_sample": False}


def draw_ids(b, t, seed=0):
    return torch.randint(3, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, **SMALL)).eval()


@pytest.fixture(scope="module")
def bart():
    torch.manual_seed(0)
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()}
    config = {"d_model": 16, "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sides, **config, **SMALL)).eval()


SIDES = {"layers": 2, "attention_heads": 2, "ffn_dim": 8}


class Reader(nn.Module):
    """A layer over embeddings of ids that it finds by itself, with positions looked up first."""

    def __init__(self):
        super().__init__()
        self.positions, self.embed = nn.Embedding(16, 12), nn.Sequential(nn.Embedding(VOCABULARY, 12), nn.Linear(12, 12))
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, batch):
        ids = batch.read
        x = self.positions(torch.arange(ids.shape[-1])) + self.embed(ids)
        return self.attention(x, x, x)[0]


class TokensFirst(nn.Module):
    """A language model with its tokens along the first axis, as in torch's tutorial."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        layer = nn.TransformerEncoderLayer(12, 2, 8)
        self.transformer_encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids):
        return self.decoder(self.transformer_encoder(self.encoder(ids)))


def test_the_ids_of_a_generation_are_what_was_returned_but_for_the_last_token_which_nothing_read(gpt2, tmp_path):
    prompt = draw_ids(2, 7)
    for options in ({}, {"use_cache": False}, {"do_sample": True, "num_return_sequences": 3}, {"max_new_tokens": 1}):
        with record(gpt2) as recording:
            written = gpt2.generate(prompt, attention_mask=torch.ones_like(prompt), **{**WRITE, **options})
        assert recording.last.rows == list(range(len(written)))
        assert torch.equal(recording.last.ids, written[:, :-1])
        assert recording.last.source_ids is None
        assert recording.last.ids.shape == (len(written), recording.map(0).shape[2])
    recording.save(tmp_path / "ids.regard")
    assert torch.equal(load(tmp_path / "ids.regard").last.ids, written[:, :-1])


def test_the_ids_of_guesses_that_were_rejected_are_not_among_them(gpt2):
    prompt = draw_ids(1, 6).repeat(1, 2)
    with record(gpt2) as recording:
        written = gpt2.generate(
            prompt, attention_mask=torch.ones_like(prompt), prompt_lookup_num_tokens=3, **{**WRITE, "max_new_tokens": 11}
        )
    t = recording.map(0).shape[2]
    assert torch.equal(recording.last.ids, written[:, :t])
    assert t >= written.shape[1] - 1


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_the_ids_of_beams_are_in_the_rows_of_the_map(name, request, tmp_path):
    model, prompt = request.getfixturevalue(name), draw_ids(2, 7)
    with record(model) as recording:
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=4, num_return_sequences=2, **WRITE)
    recording.save(tmp_path / "beams.regard")
    for run in (recording.last, load(tmp_path / "beams.regard").last):
        assert len(run.ids) == 8
        for row, sequence in zip(run.rows, written, strict=True):
            assert torch.equal(run.ids[row], sequence[:-1])
        assert (run.source_ids is None) if name == "gpt2" else torch.equal(run.source_ids, prompt)


def test_a_decoder_that_shifts_its_source_has_its_own_ids(bart):
    source = draw_ids(2, 7)
    with record(bart) as recording, torch.no_grad():
        bart(input_ids=source)
    shifted = shift_tokens_right(source, bart.config.pad_token_id, bart.config.decoder_start_token_id)
    assert torch.equal(recording.last.ids, shifted)
    assert torch.equal(recording.last.source_ids, source)
    with record(bart) as recording, torch.no_grad():
        bart.get_encoder()(source)
    assert torch.equal(recording.last.ids, source)
    assert recording.last.source_ids is None


def test_ids_are_found_where_they_are_looked_up_and_positions_are_none(gpt2):
    ids = draw_ids(3, 5)
    for read, expected in ((ids, ids), (ids[0], ids[:1])):
        with record(model := Reader()) as recording:
            model(SimpleNamespace(read=read))
        assert torch.equal(recording.last.ids, expected)
    with record(model := TokensFirst()) as recording:
        model(ids.T)
    assert torch.equal(recording.last.ids, ids)
    with record(gpt2) as recording:
        gpt2(inputs_embeds=gpt2.transformer.wte(ids).detach())
    assert recording.last.ids is None
    with pytest.raises(ConfigError, match="read no token ids"):
        recording.tokens = lambda ids: [str(n) for n in ids]


def encode_sorted(model, sentences, size):
    """Run sentences in batches by length, the longest first, padded on the right, as sentence-transformers does."""
    order = sorted(range(len(sentences)), key=lambda n: -len(sentences[n]))
    batches = [order[n : n + size] for n in range(0, len(order), size)]
    for batch in batches:
        rows = [torch.tensor(sentences[n]) for n in batch]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        model(input_ids=ids, attention_mask=(ids != 0).long())
    return batches


@pytest.mark.parametrize("tokenizer", ["function", "pieces", "convert_ids_to_tokens", "id_to_token", "decode"])
def test_each_row_of_each_run_has_the_words_of_the_sentence_that_it_read(tokenizer, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    sentences = [draw_ids(1, t, seed=t)[0].tolist() for t in (3, 7, 5, 6, 4)]
    with record(model) as recording, torch.no_grad():
        batches = encode_sorted(model, sentences, 2)
    spell = {
        "pieces": lambda ids: [f"w{n}" for n in ids],
        "id_to_token": lambda n: f"w{n}",
        "decode": lambda ids: " ".join(f"w{n}" for n in ids),
    }
    spell["convert_ids_to_tokens"] = spell["pieces"]
    recording.tokens = spell["pieces"] if tokenizer == "function" else SimpleNamespace(**{tokenizer: spell[tokenizer]})
    recording.save(tmp_path / "batches.regard")
    for found in (recording, load(tmp_path / "batches.regard")):
        assert len(found.runs) == len(batches) == 3
        for run, batch in zip(found.runs, batches, strict=True):
            longest = max(len(sentences[n]) for n in batch)
            expected = [[f"w{n}" for n in sentences[one] + [0] * (longest - len(sentences[one]))] for one in batch]
            expected = expected if len(batch) > 1 else expected[0]
            assert run.words(0) == (expected, expected)
            assert found.words(0) == found.last.words(0)
    first = replace(recording, runs=recording.runs[:1])
    assert first.words(0) == recording.runs[0].words(0)
