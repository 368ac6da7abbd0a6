"""regard: see attention, every step of it, at any length, at the speed of the fused kernels."""

from importlib import import_module

from regard.errors import (
    ConfigError,
    DataError,
    MissingNameError,
    OutOfRangeError,
    RegardError,
    ShapeError,
    TooLargeError,
    WeightsError,
)
from regard.html_repr import HtmlRepr

TYPE_CHECKING = False  # as in typing, whose import takes as long as Python's own start
if TYPE_CHECKING:
    from typing import Any

    from regard.attribution.circuits import find_circuits
    from regard.attribution.contributions import contributions
    from regard.attribution.head_effects import effects
    from regard.attribution.legrad import legrad
    from regard.attribution.path_effects import path_effects
    from regard.examination import Finding, Report, examine, examine_kernel
    from regard.generate import quantise
    from regard.head_atlas.build_atlas import atlas
    from regard.layers import (
        AdditiveAttention,
        BareSelfAttention,
        CausalAttention,
        MultiHeadAttention,
        SelfAttention,
        SimpleSelfAttention,
        StackedHeads,
    )
    from regard.map import AttentionMap
    from regard.map.paged import load_paged_maps
    from regard.mechanism import Causal, Documents, Everything, Given, Padding, Prefix, Steps, Window, attend, attention
    from regard.models import GPT2, GPT2Config
    from regard.observe.attends import attends
    from regard.observe.attention_changes import CutEdges, KnockOut, Temperature
    from regard.observe.classification.head_classification import heads
    from regard.observe.compare import compare
    from regard.observe.files.deserialize import load
    from regard.observe.implied_map import implied_map
    from regard.observe.interception.functions.hf_implementation import register_attention
    from regard.observe.intervene import intervene
    from regard.observe.patch import Patch
    from regard.observe.record import record
    from regard.observe.recording import Recording
    from regard.observe.rollout import rollout
    from regard.observe.tensor_parallel import gather_heads
    from regard.observe.token_places.diffusion import word_heat_map
    from regard.observe.token_places.places import AudioFrames, PatchGrid
    from regard.observe.token_places.token_times import token_times
    from regard.policy_audit.audit import audit
    from regard.probe.probe_heads import probe_heads
    from regard.show.head_figure import figure
    from regard.show.page import serve
    from regard.show.page.single_file import page

LAZY_NAMES = {  # the module of each name, imported when the name is first used: torch alone takes a second
    "regard.examination": ("Finding", "Report", "examine", "examine_kernel"),
    "regard.generate": ("quantise",),
    "regard.head_atlas.build_atlas": ("atlas",),
    "regard.layers": (
        "AdditiveAttention",
        "BareSelfAttention",
        "CausalAttention",
        "MultiHeadAttention",
        "SelfAttention",
        "SimpleSelfAttention",
        "StackedHeads",
    ),
    "regard.map": ("AttentionMap",),
    "regard.map.paged": ("load_paged_maps",),
    "regard.mechanism": (
        "Causal",
        "Documents",
        "Everything",
        "Given",
        "Padding",
        "Prefix",
        "Steps",
        "Window",
        "attend",
        "attention",
    ),
    "regard.models": ("GPT2", "GPT2Config"),
    "regard.observe.attends": ("attends",),
    "regard.observe.attention_changes": ("CutEdges", "KnockOut", "Temperature"),
    "regard.observe.classification.head_classification": ("heads",),
    "regard.observe.compare": ("compare",),
    "regard.observe.files.deserialize": ("load",),
    "regard.observe.token_places.diffusion": ("word_heat_map",),
    "regard.observe.implied_map": ("implied_map",),
    "regard.observe.intervene": ("intervene",),
    "regard.observe.interception.functions.hf_implementation": ("register_attention",),
    "regard.observe.patch": ("Patch",),
    "regard.observe.token_places.places": ("AudioFrames", "PatchGrid"),
    "regard.observe.record": ("record",),
    "regard.observe.recording": ("Recording",),
    "regard.observe.rollout": ("rollout",),
    "regard.observe.tensor_parallel": ("gather_heads",),
    "regard.observe.token_places.token_times": ("token_times",),
    "regard.policy_audit.audit": ("audit",),
    "regard.attribution.circuits": ("find_circuits",),
    "regard.attribution.contributions": ("contributions",),
    "regard.attribution.head_effects": ("effects",),
    "regard.attribution.legrad": ("legrad",),
    "regard.attribution.path_effects": ("path_effects",),
    "regard.probe.probe_heads": ("probe_heads",),
    "regard.show.head_figure": ("figure",),
    "regard.show.page": ("serve",),
    "regard.show.page.single_file": ("page",),
}

LAZY_MODULES = ("layers", "map", "mechanism", "policies", "train")  # modules used by their own name: regard.train.run

HtmlRepr.renderer = "regard.show.notebook"  # draws maps, recordings, tables of heads and steps in a notebook

__version__ = "0.1.0"

__all__ = [
    "GPT2",
    "AdditiveAttention",
    "AttentionMap",
    "AudioFrames",
    "BareSelfAttention",
    "Causal",
    "CausalAttention",
    "ConfigError",
    "CutEdges",
    "DataError",
    "Documents",
    "Everything",
    "Finding",
    "GPT2Config",
    "Given",
    "KnockOut",
    "MissingNameError",
    "MultiHeadAttention",
    "OutOfRangeError",
    "Padding",
    "Patch",
    "PatchGrid",
    "Prefix",
    "Recording",
    "RegardError",
    "Report",
    "SelfAttention",
    "ShapeError",
    "SimpleSelfAttention",
    "StackedHeads",
    "Steps",
    "Temperature",
    "TooLargeError",
    "WeightsError",
    "Window",
    "atlas",
    "attend",
    "attends",
    "attention",
    "audit",
    "compare",
    "contributions",
    "effects",
    "examine",
    "examine_kernel",
    "figure",
    "find_circuits",
    "gather_heads",
    "heads",
    "implied_map",
    "intervene",
    "legrad",
    "load",
    "load_paged_maps",
    "page",
    "path_effects",
    "probe_heads",
    "quantise",
    "record",
    "register_attention",
    "rollout",
    "serve",
    "token_times",
    "word_heat_map",
]


def __getattr__(name: str) -> "Any":
    """Import a public name from its module when it is first used."""
    for room, names in LAZY_NAMES.items():
        if name in names:
            return getattr(import_module(room), name)
    if name in LAZY_MODULES:
        return import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
