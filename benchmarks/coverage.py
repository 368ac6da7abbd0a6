"""How each family of the installed transformers attends, by the source of its modelling module, and which of them were tried.

A family is a folder of transformers.models with a modelling module. Nothing is run: `python -m benchmarks families` runs those
that are counted as tried. The others have their reason beside them.
"""

import re
from pathlib import Path

import torch
import transformers

from benchmarks.families import DERIVED, FAMILIES, HAND, KERNELS, OTHERS, RECURRENT, SHARED
from benchmarks.tables import Table
from observe.derived_families import find_class
from regard.observe.interception.recurrent.recurrences import is_recurrent_name

TITLE = "Families of the installed transformers, by how they attend"
COLUMNS = ["how", "recorded by", "families", "tried", "not tried"]
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
PRODUCT = re.compile(r"matmul|einsum|\bbmm\b| @ ")
PARTS = re.compile(r"Auto(Model\w*|Backbone\w*)\.from_config|load_backbone|\w+Model(_from_config)?\(config\.\w+_config")
EXCEPTIONS = {  # families whose source does not show how they attend
    "reformer": "by hand",  # a log-sum-exp in place of a softmax
    "mra": "by hand",  # kernels of its own, on a GPU only
    "yoso": "by hand",  # the same
    "mobilevitv2": "by hand",  # an entrywise product and a sum
    "dinat": "a kernel of torch",  # that of the package natten, which is not of torch
    "xlstm": "recurrence",
    **dict.fromkeys(
        (
            *("pp_ocrv5_mobile_det", "pp_ocrv5_server_det", "pp_ocrv6_medium_det", "pp_ocrv6_small_det", "pp_ocrv6_tiny_rec"),
            "vibevoice_acoustic_tokenizer",
        ),
        "none",  # their backbones are convolutions too
    ),
    "dpr": "parts of other families",
    "timm_backbone": "parts of other families",
    "timm_wrapper": "parts of other families",
}
SCIPY, TIMM = (f"it needs the package {name}; measured where that is installed" for name in ("scipy", "timm"))
REASONS = {  # why a family is not tried
    "dinat": "it needs natten before 0.20, compiled from its source, whose kernels no hook sees: its layers are in `missed`",
    "layoutlmv2": "its model needs detectron2; recorded with a convolution in place of its network for pictures",
    "mra": "it needs kernels for a GPU from a model hub, which no hook sees: its layers are in `missed`",
    "edgetam": "its network for pictures is one of the package timm; edgetam_video, without it, is measured",
    "fast_vlm": TIMM,
    "pe_audio_video": TIMM,
    "pe_video": TIMM,
    "perception_lm": TIMM,
    "timm_backbone": TIMM,
    "timm_wrapper": TIMM,
    "higgs_audio_v2_tokenizer": "it needs the package torchaudio",
    "eomt": SCIPY,
    "eomt_dinov3": SCIPY,
    "videomt": SCIPY,
    "esmfold2": "its forward needs the atoms of a molecule, made by a featurizer that transformers does not have",
    "sam3_video": "its forward needs a session whose prompts a tokenizer has read; its parts are sam3 and sam3_tracker_video",
}
WAYS = {  # by what is found first in the source: how, and what records it
    "attention registry": "the registry of attention functions",
    "a kernel of torch": "F.scaled_dot_product_attention, flex_attention or torch's own multi-head attention",
    "by hand": "the operations of its forward, from scores to values",
    "recurrence": "the functions that scan its states, as an implicit map",
    "parts of other families": "whatever its parts are recorded by",
    "none": "nothing: it has no attention (convolutions, vector quantisation, look-up)",
}


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a way to attend, with the families that were not tried by name where they are few."""
    tried = find_tried()
    found: dict[str, list[str]] = {how: [] for how in WAYS}
    for family, source in read_sources().items():
        found[EXCEPTIONS.get(family) or classify(source)].append(family)
    table = Table(f"{TITLE}: {sum(map(len, found.values()))} of transformers {transformers.__version__}", COLUMNS)
    for how, families in found.items():
        rest = [family for family in families if family not in tried]
        rest = [family if how == "none" else f"{family} ({REASONS.get(family, 'not looked at')})" for family in rest]
        table.add(how, WAYS[how], len(families), len(families) - len(rest), "" if how == "none" else ", ".join(rest))
    return table


def read_sources() -> dict[str, str]:
    """The source of each modelling module, by the folder it is in; several of one folder are joined."""
    sources: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if path.parent.name == "auto":  # which looks families up
            continue
        sources[path.parent.name] = sources.get(path.parent.name, "") + path.read_text(encoding="utf-8")
    return sources


def classify(source: str) -> str:
    """How a module attends; one that has several ways is of the first of them."""
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return "attention registry"
    if re.search(
        r"scaled_dot_product_attention\(|flex_attention\(|nn\.MultiheadAttention\(|multi_head_attention_forward\(", source
    ):
        return "a kernel of torch"
    has_softmax = re.search(r"softmax\(", source, re.IGNORECASE) and PRODUCT.search(source)
    if has_softmax and re.search(r"class \w*(Attention|Attn)\w*", source):
        return "by hand"
    if any(is_recurrent_name(name) for name in CLASS.findall(source)):
        return "recurrence"
    return "parts of other families" if PARTS.search(source) else "none"


def find_tried() -> set[str]:
    """The folders of the classes that `python -m benchmarks families` runs."""
    classes = [getattr(transformers, family.model) for family in (*FAMILIES, *OTHERS, *HAND, *KERNELS)]
    classes += [getattr(transformers, one.family.model) for one in SHARED]
    classes += [find_class(name) for name in DERIVED]
    classes += [type(family.build()) for family in RECURRENT]
    return {one.__module__.split(".")[2] for one in classes}


if __name__ == "__main__":
    print(run({}).markdown())
