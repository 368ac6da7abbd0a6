"""The settings of a checkpoint, in any known spelling, as arguments of GPT2Config; unsupported ones are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import WeightsError
from regard.weights.json_object import read_object, show_settings, show_value
from regard.weights.tensor_names import NamingScheme, Shapes, TensorMapping

GivenSettings = Mapping[str, Any]
SIZES = {  # regard's name, and those of transformers, OpenAI, nanoGPT and the lectures
    "layers": ("n_layer", "num_hidden_layers", "n_layers"),
    "heads": ("n_head", "num_attention_heads", "n_heads"),
    "width": ("n_embd", "hidden_size", "emb_dim"),
    "context": ("n_positions", "max_position_embeddings", "block_size", "context_length", "n_ctx"),
    "vocabulary": ("vocab_size", "n_vocab"),
    "inner": ("n_inner",),
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "drop_rate")
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
SUPPORTED_VALUES = {  # settings of transformers of which regard supports one value
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "auto_map": None,
}
IGNORED_SETTINGS = {"bias", "qkv_bias"}  # inferred from the tensors
RELEASED = (768, 1024, 1280, 1600)  # widths whose number of heads is known
HEAD_WIDTH = 64  # for each of these widths


def read_settings(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Read config.json or hparams.json in a folder, and return its path; empty and None if there is neither."""
    path = next((folder / name for name in ("config.json", "hparams.json") if (folder / name).is_file()), None)
    if path is None:
        return {}, None
    return read_object(path), path


def infer_sizes(dialect: NamingScheme, shapes: Shapes, source: object) -> dict[str, int]:
    """Infer the sizes of a model from the shapes of its tensors."""

    def get_matrix_shape(line: TensorMapping) -> tuple[int, ...]:
        shape = shapes.get(line.theirs, ())
        if len(shape) != 2 or 0 in shape:
            came = f"has the shape {shape}" if shape else "is missing"
            raise WeightsError(f"{source}: {line.theirs} must be a matrix; it {came}.")
        return shape

    by_ours = {line.ours[0]: line for line in (*dialect.once, *dialect.block)}
    vocabulary, width = get_matrix_shape(by_ours["tokens.weight"])
    up = by_ours["blocks.{}.up.weight"].fill_block_number(0)
    return {
        "layers": len({number for name in shapes if (number := dialect.find_block_number(name))}),
        "width": width,
        "context": get_matrix_shape(by_ours["positions.weight"])[0],
        "vocabulary": vocabulary,
        "inner": get_matrix_shape(up)[up.is_transposed],
    }


def make_config_arguments(settings: GivenSettings, sizes: Mapping[str, int], activation: str, source: object) -> dict[str, Any]:
    """Return the arguments of GPT2Config except `tied`, from the settings or, for those that are missing, from the tensors."""
    for name, only in SUPPORTED_VALUES.items():
        if (settings.get(name) or None) != (only or None) and name in settings:
            raise WeightsError(f"{source} has {show_settings({name: settings[name]})}; regard computes only {name}={only!r}.")
    found = {ours: number for ours, theirs in SIZES.items() if (number := find_size(settings, theirs, source))}
    width = found.get("width", sizes["width"])
    inner = 4 * width if settings.get("model_type") else sizes["inner"]  # transformers' default
    merged = {**sizes, "inner": inner, **found}
    merged["heads"] = found.get("heads") or infer_heads(settings, width, source)
    if width % merged["heads"]:
        raise WeightsError(f"{source}: the width {width} is not a multiple of the {merged['heads']} heads.")
    epsilon = settings.get("layer_norm_epsilon", 1e-5)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise WeightsError(f"{source} has layer_norm_epsilon={show_value(epsilon)}; it must be above 0 and below 1.")
    return {
        **merged,
        "dropout": find_dropout(settings, source),
        "activation": find_activation(settings, activation, source),
        "epsilon": epsilon,
    }


def find_size(settings: GivenSettings, theirs: tuple[str, ...], source: object) -> int | None:
    """Return a size stored under any of its names, None if it is missing."""
    values = {name: settings[name] for name in theirs if settings.get(name) is not None}
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in values.values()):
        raise WeightsError(f"{source} has {show_settings(values)}; it must be a whole number of at least 1.")
    if len(set(values.values())) > 1:
        raise WeightsError(f"{source} has {show_settings(values)}, which must be equal.")
    return next(iter(values.values()), None)


def infer_heads(settings: GivenSettings, width: int, source: object) -> int:
    """Return the number of heads if the settings do not include it; it cannot be inferred from tensors."""
    if settings.get("model_type") == "gpt2":
        return 12  # transformers' default
    if width not in RELEASED:
        raise WeightsError(
            f"{source} does not state the number of heads, and the tensors do not show it: add a config.json "
            'with {"n_head": ...} to its folder.'
        )
    return width // HEAD_WIDTH


def find_dropout(settings: GivenSettings, source: object) -> float:
    """Return the dropout probability, the same for its three places."""
    default = dict.fromkeys(DROPOUTS[:3], 0.1) if settings.get("model_type") else {}  # transformers'
    values = default | {name: settings[name] for name in DROPOUTS if settings.get(name) is not None}
    if any(not isinstance(p, float | int) or isinstance(p, bool) or not 0 <= p < 1 for p in values.values()):
        raise WeightsError(f"{source} has {show_settings(values)}; a probability is from 0 to below 1.")
    if len(set(values.values())) > 1:
        raise WeightsError(f"{source} has {show_settings(values)}; regard has one dropout for three places: make them equal.")
    return float(next(iter(values.values()), 0.0))


def find_activation(settings: GivenSettings, otherwise: str, source: object) -> str:
    """Return regard's name of the activation."""
    name = settings.get("activation_function")
    if name is not None and not (isinstance(name, str) and name in ACTIVATIONS):
        raise WeightsError(f"{source} has activation_function={show_value(name)}; regard computes {', '.join(ACTIVATIONS)}.")
    return otherwise if name is None else ACTIVATIONS[name]


def refuse_unknown_settings(settings: GivenSettings, source: object) -> None:
    """Raise WeightsError if a checkpoint's own settings include an unknown one, which might change the results."""
    names = {*(name for theirs in SIZES.values() for name in theirs), *DROPOUTS, *IGNORED_SETTINGS}
    strange = sorted(name for name in settings if name not in names)
    if strange:
        raise WeightsError(
            f"{source} has {show_settings({strange[0]: settings[strange[0]]})}, which is not a known setting of a GPT-2."
        )


def make_transformers_config(config: GivenSettings, end: int | None) -> dict[str, Any]:
    """Return the content of transformers' config.json for GPT2Config's arguments and the end-of-text token."""
    own = end if end is not None and end < config["vocabulary"] else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{SIZES[ours][0]: config[ours] for ours in SIZES},
        **dict.fromkeys(DROPOUTS[:3], config["dropout"]),
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config["activation"]),
        "layer_norm_epsilon": config["epsilon"],
        "tie_word_embeddings": config["tied"],
        "bos_token_id": own,
        "eos_token_id": own,
    }
