"""Read the weights of a GPT-2 from many sources as a config and tensors by regard's names; write them in transformers' format.

Supported sources, by folder or file: transformers' folders, safetensors or pickles, whole or in several files; OpenAI's
TensorFlow checkpoints, and .npz files with the same names; nanoGPT's and minGPT's checkpoints and state dicts, and those of the
lectures' GPT; models of the Hugging Face hub by their name; and the pocket model and the sorter, which are included in the
package. A config.json beside the file, in transformers' spelling, takes precedence. nanoGPT's activation is the exact GELU, as
it has been since June 2023. A pickle is only opened by torch's reader of plain tensors.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.atomic_write import write_atomically
from regard.errors import ConfigError, WeightsError
from regard.weights import checkpoint_settings, hub, tensor_archives
from regard.weights.json_object import show_value
from regard.weights.stored_tensor import REAL_DTYPES, StoredTensor, allocate_tensor
from regard.weights.tensor_archives import TensorArchive, Tensors
from regard.weights.tensor_names import (
    LECTURES,
    MASKS,
    NANOGPT,
    TRANSFORMERS,
    NamingScheme,
    TensorMapping,
    get_stored_shape,
    get_tensor_shape,
    recognize_scheme,
    strip_prefixes,
)
from regard.weights.translator_weights import SavableTokenizer, read_vocabulary_files

LETTERS = "letters.txt"  # the vocabulary that loading prefers, as regard.text.letters names it
END, GPT2_END = "<|endoftext|>", 50256  # the end-of-text token as regard.text.byte_pair names it, and its number in GPT-2
BYTE_PAIRS = {"vocab.bpe": "merges.txt", "encoder.json": "vocab.json"}  # regard's files and transformers' names of them
INCLUDED_MODELS = {
    name: Path(__file__).parent / name for name in ("pocket", "sorter")
}  # models in this package, with their license
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, eq=False)
class GPT2Weights:
    """The arguments of GPT2Config, the tensors by regard's names, and the folder that may contain a vocabulary."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path


class CheckpointDescription(NamedTuple):
    """A checkpoint before its tensors are read: config, folder, stored tensors by name, and their mapping to regard's."""

    config: dict[str, Any]
    folder: Path
    stored: Tensors
    lines: list[TensorMapping]


def load_weights(name: str | PathLike[str], dtype: torch.dtype | None = None) -> GPT2Weights:
    """Load the checkpoint of a folder or file, or of a model of the hub, by default in the file's own dtype.

    Models included in the package are stored in bfloat16 or float32, and loaded in float32 by default.

    Takes the memory of the tensors and of one of them in the file, or of the whole file if it is a pickle. Raises WeightsError,
    naming the file and the tensor, if one is missing, superfluous, of another shape or damaged, and if the file has settings
    that regard does not support.
    """
    if dtype not in (None, *REAL_DTYPES):
        raise ConfigError(f"dtype must be one of {', '.join(map(str, REAL_DTYPES))}, got {dtype}.")
    config, folder, stored, lines = describe_checkpoint(name)
    sources = [stored[line.theirs] for line in lines if line.theirs in stored]
    dtype = dtype or (torch.float32 if name in INCLUDED_MODELS else find_widest_dtype(sources))
    tensors: dict[str, Tensor] = {}
    for line in lines:
        parts = {ours: allocate_tensor(get_tensor_shape(ours, config), dtype, folder) for ours in line.ours}
        if line.theirs in stored:
            stored[line.theirs].copy_into(list(parts.values()), line.is_transposed)
        else:
            for part in parts.values():
                part.zero_()  # a bias that the checkpoint does not have
        tensors |= parts
    return GPT2Weights(config, tensors, folder)


def describe_checkpoint(name: str | PathLike[str]) -> CheckpointDescription:
    """Return the validated description of a checkpoint without reading its tensors. Raises the errors of load."""
    archive = tensor_archives.open_archive(find_checkpoint(name))
    stored = strip_tensor_names(archive)
    dialect = recognize_scheme({theirs: tensor.shape for theirs, tensor in stored.items()}, archive.path)
    config = infer_config(archive, dialect, stored)
    return CheckpointDescription(config, archive.folder, stored, list(check_tensors(archive, dialect, config, stored)))


def find_checkpoint(name: str | PathLike[str]) -> Path:
    """Return the path of a checkpoint by its path or name."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in INCLUDED_MODELS:
        return INCLUDED_MODELS[str(name)]
    if isinstance(name, str) and hub.is_model_name(name):
        return hub.fetch_model(name)
    raise WeightsError(
        f"{path} is not a file, a folder or the name of a model: the names are "
        f"{', '.join((*INCLUDED_MODELS, *hub.RELEASED))} and owner/model."
    )


def is_own_gpt2(name: str) -> bool:
    """Return whether a path, or the name of an included model, is a GPT-2 that needs nothing of transformers.

    A .gguf file does, and so does a folder with a tokenizer of transformers, or with a config of another family.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        return path.suffix != ".gguf" if path.exists() else name in INCLUDED_MODELS
    copies = BYTE_PAIRS.values() if all((path / file).exists() for file in BYTE_PAIRS) else ()  # beside regard's own files
    if any((path / file).exists() for file in TOKENIZERS if file not in copies):
        return False
    with suppress(OSError, ValueError, AttributeError):  # whoever reads a damaged config says what is wrong with it
        return json.loads((path / hub.CONFIG).read_text(encoding="utf-8")).get("model_type") in (None, "gpt2")
    return True


def strip_tensor_names(archive: TensorArchive) -> Tensors:
    """Return the tensors by their plain names, without the buffers that hold a mask."""
    found: Tensors = {}
    for name, tensor in archive.tensors.items():
        if strip_prefixes(name) in found:
            raise WeightsError(f"{tensor} is given twice, also as {found[strip_prefixes(name)].name}.")
        if not MASKS.search(strip_prefixes(name)):
            found[strip_prefixes(name)] = tensor
    return found


def infer_config(archive: TensorArchive, dialect: NamingScheme, stored: Tensors) -> dict[str, Any]:
    """Return the arguments of GPT2Config, from the file's settings, those in the config beside it, and the tensors."""
    checkpoint_settings.refuse_unknown_settings(archive.says, archive.path)
    settings, file = checkpoint_settings.read_settings(archive.folder)
    stated = {**archive.says, **settings}
    tied = is_tied(archive, dialect, stored, stated.get("tie_word_embeddings", True if stated.get("model_type") else None))
    exact = dialect is NANOGPT and (archive.says or tied)  # minGPT is not tied, stores no settings, and uses the tanh form
    sizes = checkpoint_settings.infer_sizes(dialect, {name: tensor.shape for name, tensor in stored.items()}, archive.path)
    return {
        **checkpoint_settings.make_config_arguments(stated, sizes, "gelu" if exact else "gelu_tanh", file or archive.path),
        "tied": tied,
    }


def is_tied(archive: TensorArchive, dialect: NamingScheme, stored: Tensors, stated: object) -> bool:
    """Return whether the head is the token embedding: as the settings state or, if they do not, as the tensors show."""
    if stated is not None and not isinstance(stated, bool):
        raise WeightsError(f"{archive.path} has tie_word_embeddings={show_value(stated)}; it must be true or false.")
    head, tokens = (stored.get(line.theirs) for line in (dialect.head, dialect.once[0]))
    if head is None or tokens is None or stated is False:
        return dialect is not LECTURES and stated is not False
    if head.shape == tokens.shape and head.is_equal(tokens):
        return True
    if stated or archive.says:
        raise WeightsError(f"{head} differs from {tokens.name}, but the settings tie the head to the token embedding.")
    return False


def check_tensors(
    archive: TensorArchive, dialect: NamingScheme, config: Mapping[str, Any], stored: Tensors
) -> Iterator[TensorMapping]:
    """Yield every line of the model; raise WeightsError for a missing or superfluous tensor, or one of another shape."""
    left = {**stored}
    if config["tied"]:
        left.pop(dialect.head.theirs, None)
    biasless = bool(dialect.biasless) and not any(name.endswith(dialect.biasless) for name in stored)
    for line in dialect.iterate_mappings(config["layers"], config["tied"]):
        found, expected = left.pop(line.theirs, None), get_stored_shape(line, config)
        if found is None and not (biasless and line.theirs.endswith(dialect.biasless)):
            raise WeightsError(f"{archive.path} has no {line.theirs}, which a GPT-2 of {config['layers']} layers has.")
        if found is not None and found.shape != expected:
            raise WeightsError(
                f"{found} must have the shape {expected}, given its config and the other tensors; it has {found.shape}."
            )
        if found is not None and found.dtype not in REAL_DTYPES:
            raise WeightsError(f"{found} holds {found.dtype}; weights must be one of {', '.join(map(str, REAL_DTYPES))}.")
        yield line
    if left:
        raise WeightsError(f"{next(iter(left.values()))} is not part of a GPT-2 of {config['layers']} layers.")


def find_widest_dtype(stored: Iterable[StoredTensor]) -> torch.dtype:
    """Return the dtype that holds the numbers of all tensors."""
    dtypes = {tensor.dtype for tensor in stored if isinstance(tensor.dtype, torch.dtype)}
    found = dtypes.pop()
    for dtype in dtypes:
        found = torch.promote_types(found, dtype)
    return found


def save_weights(
    folder: str | PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor], text: SavableTokenizer | None = None
) -> None:
    """Write a folder that transformers reads: config.json, model.safetensors and a vocabulary; none if it fails.

    A byte-pair encoding is written under regard's names and under those of transformers.
    """
    folder = Path(folder)
    is_gpt2s = text is None and config["vocabulary"] == GPT2_END + 1  # a vocabulary of GPT-2's size is taken for GPT-2's
    end = GPT2_END if is_gpt2s else getattr(text, "special", {}).get(END)
    header = json.dumps(checkpoint_settings.make_transformers_config(config, end), indent=2)
    named = convert_to_transformers(config, tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = {} if text is None else read_vocabulary_files(text)
        vocabulary |= {theirs: vocabulary[ours] for ours, theirs in BYTE_PAIRS.items() if ours in vocabulary}
        places = [folder / name for name in ("model.safetensors", "config.json", *vocabulary)]
        with write_atomically(*places) as (weights, config_file, *vocabulary_files):
            save_file(named, weights, {"format": "pt"})
            config_file.write_text(header + "\n", encoding="utf-8")
            for path in vocabulary_files:
                path.write_bytes(vocabulary[path.name])
        former = (LETTERS, *BYTE_PAIRS, *BYTE_PAIRS.values()) if vocabulary else ()  # of an earlier model
        for name in former:
            if name not in vocabulary:
                (folder / name).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the model could not be written to {folder}: {error}.") from error


def convert_to_transformers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with transformers' names and layout."""
    left, found = {**tensors}, {}
    for line in TRANSFORMERS.iterate_mappings(config["layers"], config["tied"]):
        for ours in line.ours:
            came = tuple(left[ours].shape) if ours in left else "nothing"
            if came != get_tensor_shape(ours, config):
                raise WeightsError(f"{ours} must have the shape {get_tensor_shape(ours, config)}, got {came}.")
        parts = [left.pop(ours).detach() for ours in line.ours]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        prefix = "" if line is TRANSFORMERS.head else "transformer."
        found[prefix + line.theirs] = (joined.T if line.is_transposed else joined).contiguous()
    if left:
        raise WeightsError(f"{next(iter(left))} is not part of a GPT-2 of {config['layers']} layers.")
    return found
