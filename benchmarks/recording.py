"""What recording costs: GPT-2's shape with random weights, every head of every layer looked at, beside what others do.

Plain is the forward by F.scaled_dot_product_attention; eager writes its weights out, which is how transformers hands them
over; TransformerLens keeps its cache of patterns, nnsight traces the eager model. Those two only where they are installed.

A forward of this size asks the system for tens of thousands of pages, or for none, depending on where glibc's heap ends just
then: a plain one too. Plain and record are timed with memory kept (regard.malloc), so that neither asks for any,
and once more as usual, under glibc's own rules, as all others are beside a plain one.
"""

import copy
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, PreTrainedTokenizerFast

from benchmarks.tables import Table
from benchmarks.timing import Timed, measure_peak_megabytes, time_contenders
from regard import malloc
from regard.observe import Recording, record

LENGTHS, OTHERS_UP_TO, USUAL_UP_TO = (512, 1024, 2048, 4096, 8192), 4096, 1024
CLOSELY = 100.0  # seconds for what differs by a hundredth
LAYERS, HEADS, VOCABULARY = 12, 12, 50257
TITLE = "GPT-2's shape, float32: forward inside record, and with the overview of all 144 heads"
COLUMNS = ["T", "plain ms", "record", "middle half", "record, memory as usual", "middle half"]
LOOKED = ["record + overview", "eager", "TransformerLens", "nnsight"]
WAYS = ("seen", "eager", "lens", "nnsight")
MEMORY = ["plain", "seen", "eager"]


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the plain forward, and the others as ratios to it; memory above it in fresh processes."""
    table = Table(TITLE, [*COLUMNS, *LOOKED, "MiB: plain", "MiB: record + overview", "MiB: eager"])
    check_overviews()
    for t in LENGTHS:
        ids, model = tokens(t), gpt2()
        ways: dict[str, Callable[[], Tensor]] = {
            "plain": partial(run_plainly, model, ids),
            "record": partial(run_recorded, model, ids),
        }
        malloc.keep_freed_memory()
        kept = time_contenders(ways, 0, within=CLOSELY)
        malloc.restore_malloc_defaults()
        usual = time_contenders(ways, 0, within=CLOSELY) if t <= USUAL_UP_TO else None
        ways = {"plain": ways["plain"], "seen": partial(record_overviews, model, ids)}
        if t <= OTHERS_UP_TO:
            ways |= {"eager": partial(eagerly, model, ids), **make_other_ways(model, ids)}
        looked = time_contenders(
            ways, 1e-2
        ).medians  # kept, what eager attention takes at 4,096 tokens would not fit into 24 GiB
        ratios = [looked[name] / looked["plain"] if name in looked else None for name in WAYS]
        megabytes = [in_a_fresh_process(name, t) if name != "eager" or t <= OTHERS_UP_TO else None for name in MEMORY]
        table.add(t, kept.medians["plain"], *ratio(kept), *ratio(usual), *ratios, *megabytes)
    return table


def ratio(found: Timed | None) -> tuple[float | None, str | None]:
    """Of a forward inside record to the plain one in the same round: the median, and between what the middle half lies."""
    if found is None:
        return None, None
    lower, middle, upper = found.ratio("record", to="plain")
    return middle, f"{lower:.3f} to {upper:.3f}"


def gpt2() -> GPT2Model:
    """The model, the same each time."""
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_positions=max(LENGTHS))).eval()


def tokens(t: int) -> Tensor:
    """A text (1, t)."""
    return torch.randint(0, VOCABULARY, (1, t), generator=torch.Generator().manual_seed(t))


def check_overviews(device: str = "cpu") -> None:
    """That what is seen is what eager attention computes."""
    model, ids = gpt2().to(device), tokens(300).to(device)
    with torch.no_grad(), record(model) as recording:
        model(ids)
    overviews = overview(recording)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for ours, theirs in zip(overviews, weights, strict=True):
        entropy = -(theirs * theirs.clamp_min(1e-38).log()).sum(-1)
        assert (ours - entropy).abs().max() < 1e-4, "the overview is not of the weights that the model computes"


def run_plainly(model: GPT2Model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).last_hidden_state


def run_recorded(model: GPT2Model, ids: Tensor) -> Tensor:
    with torch.no_grad(), record(model):
        return model(ids, use_cache=False).last_hidden_state


def record_overviews(model: GPT2Model, ids: Tensor) -> Tensor:
    with torch.no_grad(), record(model) as recording:
        found = model(ids, use_cache=False).last_hidden_state
    overview(recording)
    return found


def overview(recording: Recording) -> list[Tensor]:
    """All numbers of all heads; of each layer the entropies."""
    return [recording.map(layer).overview().entropy for layer in range(LAYERS)]


def eagerly(model: GPT2Model, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(ids, use_cache=False, output_attentions=True).last_hidden_state
    finally:
        model.set_attn_implementation("sdpa")


def make_other_ways(model: GPT2Model, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What else keeps the patterns of all heads, on the same weights."""
    found: dict[str, Callable[[], Tensor]] = {}
    if importlib.util.find_spec("transformer_lens"):
        found["lens"] = partial(run_with_cache, make_bridge(model), ids)
    if importlib.util.find_spec("nnsight"):
        found["nnsight"] = partial(trace_with_nnsight, model, ids)
    return found


def make_bridge(model: GPT2Model, direction: Tensor | None = None) -> torch.nn.Module:
    """The same weights in TransformerLens, with a head of one word, of a direction or random: the others compute none."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens.model_bridge import TransformerBridge

    head = GPT2LMHeadModel(GPT2Config(**{**model.config.to_dict(), "n_layer": 1, "tie_word_embeddings": False}))
    head.transformer, head.lm_head = copy.deepcopy(model), torch.nn.Linear(model.config.n_embd, 1, bias=False)
    if direction is not None:
        head.lm_head.weight = torch.nn.Parameter(direction[None], requires_grad=False)
    head.config = model.config.__class__(**{**model.config.to_dict(), "tie_word_embeddings": False})
    with tempfile.TemporaryDirectory() as folder:  # it asks for one, and finds it by its folder
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), bos_token="a", eos_token="a", pad_token="a"
        ).save_pretrained(folder)
        words = PreTrainedTokenizerFast.from_pretrained(folder)
        return TransformerBridge.boot_transformers("gpt2", hf_model=head.eval(), tokenizer=words, device="cpu")


def run_with_cache(theirs: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids, names_filter=lambda name: name.endswith(("hook_pattern", "ln_final.hook_out")))
        assert len(cache) == LAYERS + 1, "patterns of all layers"
        return cache["ln_final.hook_out"]


def trace_with_nnsight(model: GPT2Model, ids: Tensor) -> Tensor:
    from nnsight import NNsight, save

    model.set_attn_implementation("eager")
    try:
        wrapped = NNsight(model)
        with torch.no_grad(), wrapped.trace(ids, use_cache=False):
            patterns = save([wrapped.h[layer].attn.output[1] for layer in range(LAYERS)])
            last = wrapped.output.last_hidden_state.save()
        assert len(patterns) == LAYERS
        return last
    finally:
        model.set_attn_implementation("sdpa")


def in_a_fresh_process(name: str, t: int) -> float | None:
    """The peak megabytes of a way, above the model."""
    command = [sys.executable, "-m", "benchmarks.recording", name, str(t)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) if ran.stdout.strip() else None


def print_peak(name: str, t: int) -> None:
    """What the fresh process prints."""
    ways = {"plain": run_plainly, "seen": record_overviews, "eager": eagerly}
    model = gpt2()
    record_overviews(model, tokens(300))  # the compiled code, and what is set up at a first call
    print(measure_peak_megabytes(partial(ways[name], model, tokens(t))) or "")


if __name__ == "__main__":
    print_peak(sys.argv[1], int(sys.argv[2]))
