"""Models by their name on the Hugging Face hub: from the local cache, or downloaded into it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard.errors import WeightsError
from regard.weights.json_object import read_weight_map
from regard.weights.tensor_archives import INDEX, MODEL_FILES

RELEASED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
OWNER = "openai-community"  # of the released sizes
CONFIG, VOCABULARY_FILES = "config.json", ("vocab.json", "merges.txt")


def is_model_name(name: str) -> bool:
    """Return whether a name is a released size, or owner/model."""
    return name in RELEASED or re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def fetch_model(name: str) -> Path:
    """Return the folder of a model of the hub, downloaded if needed; raise WeightsError, saying what to do, if that fails."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise WeightsError(
            f'{name} is not a local file. {describe_manual_download(name)}, or: pip install "regard[hub]".'
        ) from None
    try:
        return download_model(name if is_cached(hub, name) else add_owner(name), hub, errors.EntryNotFoundError)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = f"{name} is not a local file and not in the hub's cache, and the hub cannot be reached."
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, errors.HFValidationError, OSError) as error:
        reason = f"{name} cannot be downloaded from the hub: {(str(error) or type(error).__name__).splitlines()[0]}"
    raise WeightsError(f"{reason} {describe_manual_download(name)}.")


def add_owner(name: str) -> str:
    """Return the name with its owner."""
    return f"{OWNER}/{name}" if name in RELEASED else name


def describe_manual_download(name: str) -> str:
    """Describe how to download a model without the hub's client."""
    files = f"{CONFIG}, {MODEL_FILES[0]}, {' and '.join(VOCABULARY_FILES)}"
    return f"Download {files} from https://huggingface.co/{add_owner(name)} into a folder, and load it by the folder's path"


def is_cached(hub: Any, name: str) -> bool:
    """Return whether the cache holds a model under this very name, as after transformers downloaded "gpt2"."""
    return isinstance(hub.try_to_load_from_cache(name, CONFIG), str)


def download_model(repository: str, hub: Any, absent: type[Exception]) -> Path:
    """Download the missing files of a model into the cache, and return its folder there."""
    folder = Path(hub.hf_hub_download(repository, CONFIG)).parent
    for number, file in enumerate(MODEL_FILES):
        try:
            found = Path(hub.hf_hub_download(repository, file))
            break
        except absent:
            if number == len(MODEL_FILES) - 1:
                raise
    for file in list_indexed_files(found):
        hub.hf_hub_download(repository, file)
    for file in VOCABULARY_FILES:
        with suppress(absent):
            hub.hf_hub_download(repository, file)
    return folder


def list_indexed_files(file: Path) -> Iterator[str]:
    """Yield the files that an index lists."""
    if file.name.endswith(INDEX):
        with suppress(WeightsError):  # a damaged index is refused when it is read
            yield from sorted(set(read_weight_map(file).values()))
