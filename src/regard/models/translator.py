"""Load a translator of any kind from a folder, by its path or by the name of a bundled one."""

from pathlib import Path

import torch

from regard.errors import RegardError, WeightsError
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer
from regard.text import BytePair, byte_pair
from regard.weights import translator_weights as files
from regard.weights.meta_modules import create_on_meta

Translator = RecurrentTranslator | Transformer
KINDS: dict[str, type[Translator]] = {kind.KIND: kind for kind in (RecurrentTranslator, Transformer)}


def load(name: str | Path, dtype: torch.dtype = torch.float32) -> Translator:
    """Load the translator of a folder, or of a name ("translator", "translator-plain"), in evaluation mode, with its text.

    The file may be in another dtype, such as bfloat16 or int8. Raises WeightsError, naming the file and the tensor.
    """
    settings = files.read_settings(name)
    with create_on_meta():  # refuse settings larger than the file before they take memory
        files.open_checked_archive(settings.folder, build_model(settings).state_dict())
    model = build_model(settings).to(dtype)
    files.fill_tensors(settings.folder, model.state_dict())
    if any((settings.folder / file).is_file() for pair in byte_pair.FILES for file in pair):
        model.text = BytePair.load(settings.folder)
    return model.eval()


def build_model(settings: files.TranslatorSettings) -> Translator:
    """Build an untrained model of these settings."""
    place = settings.folder / files.SETTINGS
    if settings.kind not in KINDS:
        raise WeightsError(f"{place} has kind={settings.kind!r}; expected one of {', '.join(KINDS)}.")
    try:
        return KINDS[settings.kind](**settings.sizes)
    except (RegardError, RuntimeError, TypeError, ValueError, OverflowError) as error:  # OverflowError: torch's, for sizes
        raise WeightsError(f"{place} does not describe a valid {settings.kind} translator: {error}.") from None
