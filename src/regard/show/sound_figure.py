"""A figure of attention to sound: the waveform or the spectrogram above the map, on one axis of time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.mechanism.arguments import check_index, check_instance, check_number, describe_value
from regard.observe import Recording
from regard.observe.recorded_runs.run import IMPLICIT
from regard.observe.token_places.places import AudioFrames
from regard.show.axis_words import choose_map_kind, get_axis_words
from regard.show.color_scale import Signed
from regard.show.figure import COLORMAP, FAINT, INKS, MIN_TEXT_SIZE, PAPER, SIGNED_COLORMAP, TEXT_SIZE, Picture, format_word
from regard.terminal_escapes import escape_controls

WIDTH, SOUND, GAP, BELOW, ABOVE, RIGHT, LEFT = 6.6, 0.9, 0.12, 0.5, 0.4, 0.95, 1.1  # inches
ROW, MAX_HEIGHT, MIN_HEIGHT = 0.2, 6.0, 1.2  # inches
MAX_PIXELS = 1024  # of the map along an axis
RATE = 16_000  # samples a second
MARK = "#c2571a"


def draw_sound(
    recording: Recording,
    sound: Any,
    layer: int = -1,
    head: int | None = None,
    *,
    times: Tensor | Sequence[float] | None = None,
    rate: float = RATE,
    kind: str | None = None,
    part: str | None = None,
    row: int = 0,
    title: str | None = None,
) -> Picture:
    """Draw sound above the attention to it, on one axis of time: of a head, or the mean over the heads of a layer.

    sound is a waveform (samples,), with `rate` samples a second, or a spectrogram (bands, frames), over the whole axis. kind is
    cross where there is cross attention to frames of sound, else self; of "self" the queries are frames too. Of "implicit", the
    kind where no layer has a softmax, entries are signed: blue is above 0, brown below. times are those of
    the queries in seconds, as regard.token_times returns them, and are marked. row is the batch row.
    Raises ConfigError if the times of the keys are not known: set recording.places.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    kind = choose_sound_kind(recording, part) if kind is None else choose_map_kind(recording, kind)
    frames = next((one for one in recording.axis_places(layer, kind, part)[1] if isinstance(one, AudioFrames)), None)
    if frames is None:
        raise ConfigError(
            f"the keys of layer {layer} are not known as frames of sound: set recording.places = regard.AudioFrames(seconds)."
        )
    m: AttentionMap | ImplicitMap = recording.map(layer, head, kind, part)
    q, k = m.shape[2:]
    m = m.select(batch=check_index("row", row, m.shape[0], "the batch"))
    size = min(q, MAX_PIXELS), min(k, MAX_PIXELS)
    values = m.pooled(*size, how="max" if m.shape[1] == 1 else "mean")[0].mean(0).double().cpu().numpy()
    marks = read_times(times, q, row)
    end = k * frames.seconds
    tall = min(max(ROW * q, MIN_HEIGHT), MAX_HEIGHT)
    figure = Picture(figsize=(LEFT + WIDTH + RIGHT, ABOVE + SOUND + GAP + tall + BELOW))
    above = figure.add_axes_at(LEFT, BELOW + tall + GAP, WIDTH, SOUND)
    draw_waveform(above, convert_sound(sound), check_number("rate", rate), end)
    label = f"layer {range(len(recording.layers(kind, part)))[layer]}, " + (
        "mean over the heads" if head is None else f"head {head}"
    )
    above.set_title(escape_controls(title or label), fontsize=TEXT_SIZE + 1, loc="left", parse_math=False)
    axes = figure.add_axes_at(LEFT, BELOW, WIDTH, tall)
    if kind == IMPLICIT:
        (low, high), colors = Signed().ends(values.ravel().tolist()), SIGNED_COLORMAP
    else:
        (low, high), colors = (0.0, None), COLORMAP
    settings = {"cmap": colors, "vmin": low, "vmax": high, "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(values, extent=(0, end, q, 0), **settings)  # type: ignore[arg-type]
    axes.set_xlabel("seconds", fontsize=TEXT_SIZE)
    axes.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT)
    axes.spines[:].set_visible(False)
    if kind == "cross":
        label_words(axes, get_axis_words(recording, layer, kind, part, row, (q, k))[0], tall)
    else:
        axes.set_ylabel("query, frame", fontsize=TEXT_SIZE)
    for n, second in enumerate(marks):
        axes.plot([second, second], [n, n + 1], color=MARK, linewidth=1.4)
    bar = figure.colorbar(image, cax=figure.add_axes_at(LEFT + WIDTH + 0.15, BELOW, 0.12, tall))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT)
    return figure


def choose_sound_kind(recording: Recording, part: str | None) -> str:
    """Return cross where its keys are frames of sound, else self, or implicit where no layer has a softmax."""
    crossing = recording.layers("cross", part)
    found = recording.axis_places(0, "cross", part)[1] if crossing else []
    return "cross" if any(isinstance(one, AudioFrames) for one in found) else choose_map_kind(recording)


def read_times(times: Any, count: int, row: int) -> list[float]:
    """Return the seconds of the queries: of one batch row, with or without the end. Raises ShapeError if they are others."""
    if times is None:
        return []
    found = torch.as_tensor(times)
    found = found[row] if found.dim() == 2 else found
    if found.dim() != 1 or len(found) not in (count, count + 1):
        raise ShapeError(f"times must be one for each of the {count} queries, got {describe_value(times)}.")
    return [float(second) for second in found[:count]]


def convert_sound(sound: Any) -> Any:
    """Return a waveform (samples,) or a spectrogram (bands, frames) as an array. Raises ShapeError for another shape."""
    found = torch.as_tensor(sound).detach().double().cpu()
    found = found[0] if found.dim() == 3 and len(found) == 1 else found
    found = found[0] if found.dim() == 2 and len(found) == 1 else found
    if found.dim() not in (1, 2) or not found.numel():
        raise ShapeError(f"sound must be a waveform (samples,) or a spectrogram (bands, frames), got {describe_value(sound)}.")
    return found.numpy()


def draw_waveform(axes: Axes, sound: Any, rate: float, end: float) -> None:
    """Draw a waveform, or a spectrogram, from 0 to the end in seconds."""
    if sound.ndim == 2:
        axes.imshow(
            sound, cmap=COLORMAP, extent=(0, end, 0, len(sound)), origin="lower", aspect="auto", interpolation="nearest"
        )
    else:
        axes.plot(np.arange(len(sound)) / rate, sound, color=INKS[0], linewidth=0.5)
        axes.set_xlim(0, end)
    axes.set(xticks=[], yticks=[])
    axes.set_facecolor(PAPER)
    axes.spines[:].set_visible(False)


def label_words(axes: Axes, words: Sequence[str], tall: float) -> None:
    """Label the rows with words, skipping some where they would not be readable."""
    step = max(round(MIN_TEXT_SIZE * 1.25 / (72 * tall / len(words)) + 0.49), 1)
    places = range(0, len(words), step)
    axes.set_yticks([place + 0.5 for place in places], labels=[format_word(words[place]) for place in places])
