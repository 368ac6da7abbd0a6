"""`regard see --text`: what the words of a prompt, and of what a model adds to it, look at in an image."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    LlavaForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from cli.prompted_models import IMAGE, SMALL, make_qwen, save_llava, save_paligemma
from cli.test_see import see
from regard import ConfigError, load
from regard.cli.image_prompt import ImagePrompter, load_image_prompter
from regard.cli.image_reader import record_image
from regard.show.patch_weights import compute_patch_weights

PROMPT = "what is on her hat ?"
ASKED = PROMPT.split()
TOWER = "model.vision_tower.encoder.layers.0.self_attn"
LINE = re.compile(r"^ *(\d+)  (\S+) +(\d\.\d\d)  patch (\d),(\d) +(\d\.\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("words")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)).save(place / "image.png")
    save_llava(place / "llava")
    return place


@torch.no_grad()
def run_eagerly(kind, folder, image, **more):
    """The weights (h, q, k) of the layers of the language model, and the ids, as the model itself returns them."""
    processor, model = AutoProcessor.from_pretrained(folder), kind.from_pretrained(folder, attn_implementation="eager")
    inputs = processor(images=np.array(Image.open(image)), text=f"{IMAGE}{PROMPT}", return_tensors="pt")
    inputs.pop("labels", None)
    if not more:
        return [one[0] for one in model(**inputs, output_attentions=True).attentions], inputs["input_ids"][0]
    found = model.generate(**inputs, **more, do_sample=False, output_attentions=True, return_dict_in_generate=True)
    count = found.sequences.shape[1] - 1
    layers = []
    for layer in range(len(found.attentions[0])):
        rows = [step[layer][0] for step in found.attentions]
        layers.append(torch.cat([torch.nn.functional.pad(one, (0, count - one.shape[-1])) for one in rows], 1))
    return layers, found.sequences[0, :-1]


def expect_lines(out, weights, ids, image, head=None):
    """Each line of the table is of the model's own weights (h, q, k)."""
    rows = weights.mean(0) if head is None else weights[head]
    patches = (ids == image) & ((ids == image).cumsum(0) <= 36)  # a model with random weights may write that token too
    found = {int(number): others for number, *others in LINE.findall(out)}
    assert list(found) == [n for n in (~patches).nonzero().flatten().tolist() if rows[n, patches].any()]
    for number, (_, share, row, column, most) in found.items():
        on_image = rows[number, patches]
        assert float(share) == pytest.approx(float(on_image.sum()), abs=0.0051)
        assert 6 * int(row) + int(column) == int(on_image.argmax())
        assert float(most) == pytest.approx(float(on_image.max()), abs=0.00051)
    return [word.strip("“”") for word, *_ in found.values()]


@pytest.mark.parametrize("width", [40, 80])
def test_each_word_of_a_prompt_has_a_line_of_what_it_looks_at(capsys, monkeypatch, place, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = see(capsys, place / "image.png", "--model", place / "llava", "--text", PROMPT)
    assert (code, err) == (0, "")
    layers, ids = run_eagerly(LlavaForConditionalGeneration, place / "llava", place / "image.png")
    assert expect_lines(out, layers[1], ids, 4) == ASKED
    assert "the image as 6 x 6 patches. 42 tokens" in " ".join(out.split())
    assert "“?”, token 41: what it looks at, layer 1, mean over the heads" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of the processor
def test_words_of_paligemma_look_at_its_image(capsys, tmp_path, place):
    save_paligemma(tmp_path / "paligemma")
    capsys.readouterr()  # the progress of transformers
    code, out, err = see(capsys, place / "image.png", "--model", tmp_path / "paligemma", "--text", PROMPT)
    assert (code, err) == (0, "")
    layers, ids = run_eagerly(PaliGemmaForConditionalGeneration, tmp_path / "paligemma", place / "image.png")
    assert expect_lines(out, layers[1], ids, 4)[1:7] == ASKED  # after the token that begins a text


@pytest.mark.slow
def test_packed_patches_of_qwen_are_laid_on_the_resized_image():
    pixels = np.random.default_rng(0).integers(0, 255, (30, 43, 3), np.uint8)
    model, processor = make_qwen()
    prompter = ImagePrompter("qwen", model, processor, PROMPT)
    seen = record_image(prompter, pixels)
    recording = seen.recording
    assert seen.images[0].shape == (32, 40, 3)  # 8 x 10 patches, of which 2 x 2 are a token
    layer = recording.layers()[-1]
    found = compute_patch_weights(recording, layer, query=len(recording.tokens) - 2)
    assert (found.grid.rows, found.grid.columns, found.query) == (4, 5, "“hat”, token 26")
    inputs = prompter.prepare(pixels).inputs
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[-1][0].mean(0)
    torch.testing.assert_close(found.values, weights[-2, 1:21].view(4, 5).double(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_one_word_is_shown_and_a_layer_of_the_tower_by_its_path(capsys, place, tmp_path):
    _, out, _ = see(capsys, place / "image.png", "--model", place / "llava", "--text", PROMPT, "--query", "hat")
    assert "“hat”, token 40: what it looks at" in out
    assert not LINE.findall(out)
    flags = "--text", PROMPT, "--query", "hat", "--head", "0", "--page", tmp_path / "hat.html"
    assert see(capsys, place / "image.png", "--model", place / "llava", *flags)[0] == 0
    start = re.search(r'id="regard-start">(.*?)</script>', (tmp_path / "hat.html").read_text(encoding="utf-8"))[1]
    state = json.loads(start)["recordings"][0]["state"]
    assert state == {"kind": "self", "part": "language_model", "layer": 0, "q": 40}
    _, towered, _ = see(capsys, place / "image.png", "--model", place / "llava", "--text", PROMPT, "--head", TOWER)
    _, alone, _ = see(capsys, place / "image.png", "--model", place / "llava", "--head", "0")
    assert towered.partition("class token: ")[2].replace(TOWER, "0") == alone.partition("class token: ")[2] != ""


@pytest.mark.slow
def test_the_recording_the_page_and_the_figure_are_of_the_same_words(capsys, monkeypatch, place, tmp_path):
    drawn = []
    monkeypatch.setattr("regard.cli.see.save_figure", lambda figure, path: drawn.append(figure))
    files = {name: tmp_path / f"one.{end}" for name, end in (("out", "reg"), ("page", "html"), ("figure", "png"))}
    flags = [part for name, file in files.items() for part in (f"--{name}", file)]
    code, _, err = see(capsys, place / "image.png", "--model", place / "llava", "--text", PROMPT, *flags)
    assert (code, err) == (0, "")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles[1:-1] == [f"“{word}”, token {n}" for n, word in enumerate(ASKED, 36)]
    assert drawn[0].axes[0].get_xlabel() == "layer 1, mean over the heads"
    assert load(files["out"]).tokens[-6:] == ASKED
    page = files["page"].read_text(encoding="utf-8")
    assert "the logit of the next word “" in page


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--query", "hat"], "--query and --tokens are of words beside the image: pass --text PROMPT."),
        (["--tokens", "3"], "--query and --tokens are of words beside the image: pass --text PROMPT."),
        (["--tokens", "-1"], "--tokens must be at least 0, got -1."),
        (["--text", " "], "--text must be a question about the image, got no words."),
        (["--text", "a", "--query", "a", "--patch", "1,2"], "leave out one of them"),
        (["--text", "a", "--model", "{place}/vit"], "is a ViT, which continues no text about an image: leave out --text."),
        (["--text", "a", "--head", "1.2", "--rollout"], "over all heads: name the layer alone, --head 1, not 1.2."),
        (
            ["--text", "a", "--model", "digits"],
            "the model digits reads no words: pass --model with one of images and words, such as llava-hf/llava-1.5-7b-hf, "
            "or leave out --text.",
        ),
        (["--text", "a", "--head", "1.2.3", "--model", "{place}/none"], "a head must be given as layer and number"),
        (["--text", "a", "--model", "{place}/none"], "is not a folder"),
    ],
)
def test_a_wrong_choice_is_one_line(capsys, place, flags, says):
    if not (place / "vit").exists():
        ViTModel(ViTConfig(**SMALL, image_size=24, patch_size=4)).save_pretrained(place / "vit")
    wanted = [one.format(place=place) for one in ["--model", f"{place}/llava", *flags]]
    code, _, err = see(capsys, place / "image.png", *wanted)
    assert code == 2
    assert says in " ".join(err.split())


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_prompt_that_the_model_refuses_is_one_line(place, tokens):
    prompter = load_image_prompter(str(place / "llava"), PROMPT, tokens)
    inputs = prompter.prepare(np.zeros((24, 24, 3), np.uint8)).inputs
    inputs["input_ids"][0, 3] = 5  # one token less of the image than features
    with pytest.raises(ConfigError, match=r"^llava does not run on this prompt: .* Shorten the prompt and --tokens"):
        prompter.run(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--head", "tower"], "--head is no layer: tower. Recorded: model.vision_tower.encoder.layers.0.self_attn, "),
        (["--head", "7"], "layer must be below 2"),
        (["--query", "dog"], "'dog' is neither a word of the text nor a number from 0 to 41."),
        (["--query", "hat", "--head", TOWER], f"--query is a token of the prompt, and the 37 tokens of {TOWER} are others"),
        (["--query", "33", "--head", TOWER], f"--query is a token of the prompt, and the 37 tokens of {TOWER} are others"),
    ],
)
def test_a_wrong_place_is_one_line_and_the_recording_is_saved(capsys, place, tmp_path, flags, says):
    flags = *flags, "--out", tmp_path / "one.reg"
    code, _, err = see(capsys, place / "image.png", "--model", place / "llava", "--text", PROMPT, *flags)
    assert code == 2
    assert says in " ".join(err.split())
    assert load(tmp_path / "one.reg").tokens[-6:] == ASKED
