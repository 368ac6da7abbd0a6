import numpy as np
import pytest
import torch
from transformers import GenerationMixin, WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from regard import AudioFrames, ConfigError, record, token_times
from regard.observe.token_places.token_times import align_tokens, average_heads

HEADS = [[0, 1], [1, 0], [1, 2]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 3}
    widths = {"d_model": 24, "num_mel_bins": 5, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 61}
    lengths = {"max_source_positions": 43, "max_target_positions": 31, "init_std": 0.6}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 3}
    free = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **widths, **lengths, **ends, **free)).eval()


def generate(model, rows, beams=1):
    """A recording of tokens being written, and the output that transformers' own function reads, of the same run."""
    given = {"input_features": torch.randn(rows, 5, 86, generator=torch.Generator().manual_seed(7))}
    given |= {"decoder_input_ids": torch.full((rows, 2), 3), "max_new_tokens": 9, "num_beams": beams, "do_sample": False}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        theirs = GenerationMixin.generate(model, **given, output_attentions=True, return_dict_in_generate=True)
        model.set_attn_implementation("sdpa")
        with record(model) as recording:
            GenerationMixin.generate(model, **given)
    return recording, theirs


@pytest.mark.parametrize("frames", [None, 37])
def test_times_are_those_of_transformers_to_the_frame(model, frames):
    recording, theirs = generate(model, 3)
    number = None if frames is None else 2 * frames
    expected = model._extract_token_timestamps(theirs, HEADS, num_frames=number, num_input_ids=2)
    found = token_times(recording, HEADS, prompt=2, frames=frames)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    assert len(found.unique()) > 3


def test_the_times_of_beams_are_those_of_the_rows_that_were_returned(model):
    recording, theirs = generate(model, 2, beams=3)
    expected = model._extract_token_timestamps(theirs, HEADS, num_input_ids=2)
    found = token_times(recording, HEADS, prompt=2)[recording.last.rows]
    assert torch.equal(found, expected)
    assert len(found.unique()) > 3


def test_a_path_through_any_costs_is_that_of_transformers():
    draw = np.random.default_rng(3)
    for rows, columns in ((1, 1), (1, 7), (5, 3), (7, 23), (11, 11)):
        costs = draw.standard_normal((rows, columns)).round(1)  # equal costs, so that ties are met
        text, times = _dynamic_time_warping(costs)
        starts = times[np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)]
        assert align_tokens(costs).tolist() == starts.tolist()


@pytest.mark.parametrize("silent", [slice(0, 3), slice(33, 37), slice(57, 60)])
def test_frames_that_no_token_looks_at_do_not_move_the_times(silent):
    middles = torch.arange(6).unsqueeze(-1) * 10 + 5
    weights = torch.exp(-((torch.arange(60) - middles) / 4).square()).unsqueeze(0)
    weights[..., silent] = 0
    found = align_tokens((-average_heads(weights, 7)).double().numpy())
    assert found.tolist() == [0, 10, 20, 30, 40, 50]


def test_sound_that_is_not_known_is_an_error(model):
    with torch.no_grad(), record(model) as recording:
        model(input_features=torch.randn(1, 5, 86), decoder_input_ids=torch.tensor([[3, 4, 5]]))
    assert token_times(recording).shape == (1, 4)
    recording.places = {"encoder": AudioFrames(0.02)}
    with pytest.raises(ConfigError, match="frames of sound"):
        token_times(recording)
    recording.places = {"cross": AudioFrames(0.02)}
    with pytest.raises(ConfigError, match="odd number"):
        token_times(recording, median=4)
    with pytest.raises(ConfigError, match="pairs of layer and head"):
        token_times(recording, [3])


def align_as_openai(weights, prompt):
    """The frames at which tokens start by openai-whisper's rule: weights (n, q, k) over all rows, the end's row left out."""
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    normal = torch.nn.functional.pad((weights - mean) / deviation, (3, 3), mode="reflect")
    costs = -normal.unfold(-1, 7, 1).median(-1).values.mean(0)[prompt - 1 : -1]
    text, times = _dynamic_time_warping(costs.double().numpy())
    return times[np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)]


@pytest.mark.parametrize("frames", [None, 29])
def test_the_rule_of_openai_is_of_the_rows_that_chose_the_tokens_and_leaves_the_end_out(model, frames):
    ids = torch.randint(4, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    features = torch.randn(2, 5, 86, generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), record(model) as recording:
        model(input_features=features, decoder_input_ids=ids)
    found = token_times(recording, HEADS, prompt=3, frames=frames, rule="openai")
    for row in range(2):
        scores = [torch.log(recording.map(*head, kind="cross")[row, 0]) for head in HEADS]
        weights = torch.stack(scores)[..., :frames].softmax(-1)  # of the frames alone, as the package cuts the scores
        expected = align_as_openai(weights, 3) * 0.02
        assert found[row, 3:12].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert found[row, 12] == found[row, 11]  # the end of the last word
        assert not found[row, :3].any()
    assert not torch.equal(found, token_times(recording, HEADS, prompt=3, frames=frames))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a file that it leaves open
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # the package's own
def test_times_by_the_rule_of_openai_are_those_of_its_package():
    whisper = pytest.importorskip("whisper", reason="openai-whisper, which it compares with, is not installed")
    torch.manual_seed(0)
    sizes = whisper.model.ModelDimensions(80, 50, 32, 4, 2, 51865, 64, 32, 4, 2)
    model = whisper.model.Whisper(sizes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.requires_grad_(False), std=0.3)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1] = True
    model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    tokenizer = whisper.tokenizer.get_tokenizer(True, num_languages=model.num_languages, language="en", task="transcribe")
    text, prompt = [36233, 7193, 49318, 9577, 2878, 9577], [*tokenizer.sot_sequence, tokenizer.no_timestamps]
    ids, mel = torch.tensor([[*prompt, *text, tokenizer.eot]]), torch.randn(80, 100)
    with record(model) as recording:
        model(mel[None], ids)
    assert torch.equal(recording.last.ids, ids)
    recording.places = {"cross": AudioFrames(0.02)}
    for frames in (50, 31):
        timings = whisper.timing.find_alignment(model, tokenizer, text, mel, 2 * frames)
        starts = [one.start for one in timings for _ in one.tokens]
        heads = [(1, head) for head in range(4)]
        found = token_times(recording, heads, prompt=len(prompt), frames=frames, rule="openai")
        assert found[0, len(prompt) :].tolist() == pytest.approx([*starts, timings[-1].end, timings[-1].end], abs=1e-6)
    options = whisper.DecodingOptions(beam_size=3, fp16=False, language="en", sample_len=6, without_timestamps=True)
    with record(model) as recording:
        result = whisper.decode(model, mel, options)
    recording.places = {"cross": AudioFrames(0.02)}
    with pytest.raises(ConfigError, match=r"set recording\.last\.rows"):
        token_times(recording, prompt=4)
    t = recording.last.ids.shape[1] - 4
    rows = [row for row, read in enumerate(recording.last.ids[:, 4:].tolist()) if read == result.tokens[:t]]
    recording.last.rows = rows
    assert token_times(recording, prompt=4)[rows].shape == (1, t + 5)


def test_a_rule_that_cannot_be_followed_is_an_error(model):
    recording, _ = generate(model, 2)
    with pytest.raises(ConfigError, match="one forward over the prompt"):
        token_times(recording, HEADS, prompt=2, rule="openai")
    with pytest.raises(ConfigError, match="transformers"):
        token_times(recording, HEADS, prompt=2, rule="whisper")
    recording, _ = generate(model, 2, beams=3)
    recording.last.rows = []
    with pytest.raises(ConfigError, match="beams"):
        token_times(recording, HEADS, prompt=2)
