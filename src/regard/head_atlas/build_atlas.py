"""Build an atlas: plan it, compute its shards in this process or by Ray, merge them, and write its tables and pages."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.errors import ConfigError, RegardError
from regard.evaluation_mode import evaluate_mode
from regard.head_atlas.atlas import check_examples, read_atlas
from regard.head_atlas.documents import SHORTEST, DocumentStore
from regard.head_atlas.plan import (
    MOST,
    AtlasSettings,
    check_content,
    compute_weight_checksum,
    describe_source,
    get_shard_path,
    make_plan,
    set_threads,
    write_shard,
)
from regard.head_atlas.sampled_rows import VisibleKeys, score_rows, select_queries
from regard.head_atlas.site import write_site
from regard.head_atlas.statistics import State, add_rows, make_state
from regard.head_atlas.tables import write_tables
from regard.malloc import keep_freed_memory
from regard.mechanism.arguments import check_choice, check_count, check_path, describe_value
from regard.mechanism.mask_algebra import Mask
from regard.observe.classification.head_scores import HeadOptions, UserScore, define_user_scores
from regard.observe.head_table import Heads
from regard.observe.record import record
from regard.observe.recorded_runs.words import is_punctuation
from regard.probe.repeated_tokens import find_begin_token, find_context
from regard.show.page.model_adapter import ModelAdapter, adapt_model
from regard.show.page.translator_adapter import TranslatorAdapter
from regard.text.corpus.sources import Source

TOKENS, QUERIES, EXAMPLES, SHARD_SIZE = 1024, 64, 5, 8
MOST_EXAMPLES = 1000
ENGINES = ("local", "ray")
RETRIES = 3  # of a shard whose worker was killed
Watch = Callable[[Iterable[int], int], Iterable[int]]


def atlas(
    model: Any,
    source: Source,
    folder: str | Path,
    *,
    documents: int | None = None,
    tokens: int = TOKENS,
    queries: int = QUERIES,
    examples: int = EXAMPLES,
    shard_size: int = SHARD_SIZE,
    shard: tuple[int, int] | None = None,
    engine: str = "local",
    scores: Sequence[UserScore] = (),
    watch: Watch = lambda shards, count: shards,
) -> Heads | None:
    """Score every head of a model over many documents; write tables and pages into a folder, and return the table of heads.

    model is a GPT2 with its vocabulary, or an object with name, model, encode, decode, tokens and run. source are texts: a
    file, a folder of files, or an iterable of texts. A document is cut into pieces of at most `tokens` tokens, the begin token
    included, and documents is the most pieces that are read. Of each piece, `queries` queries count, evenly spaced.

    The work is done in shards of `shard_size` pieces. A shard's file depends on nothing but the plan in the folder, so the
    result has the same bits whichever process computes it and in whatever order, on one kind of processor: a run that was
    killed continues when the same call is made again. shard=(i, n) computes every n-th shard from the i-th, from 0, and returns
    None unless all are there; several machines can share the folder. engine="ray" distributes the shards by Ray. scores are
    functions of an AttentionMap with a docstring, as `regard.heads` takes them. `watch` is called with the shards and their
    number, for a progress bar.

    Raises ConfigError for settings that cannot be used or that differ from those of the folder, DataError for texts or files
    that cannot be read.
    """
    check_choice("engine", engine, ENGINES)
    check_sizes(tokens, queries, examples, shard_size, documents)
    check_shard(shard)
    check_inputs(source, watch)
    HeadOptions(scores=scores).check()
    adapter, place = adapt_model(model), Path(check_path("folder", folder))
    if isinstance(adapter, TranslatorAdapter):
        raise ConfigError(f"an atlas needs a language model, and {adapter.name} is a translator.")
    context = find_context(adapter.model) or adapter.context
    name, checksum = describe_source(check_path("source", source) if isinstance(source, str) else source)
    plan = make_plan(
        place,
        AtlasSettings(
            model=adapter.name,
            weights=compute_weight_checksum(adapter.model),
            corpus=name,
            checksum=checksum,
            tokens=tokens if context is None else min(tokens, context),
            most=documents,
            queries=queries,
            examples=examples,
            shard_size=shard_size,
            threads=torch.get_num_threads(),
            begin=find_begin_token(adapter.model),
            scores=[list(pair) for pair in define_user_scores(scores).items()],
        ),
        source,
        adapter,
    )
    own = range(plan.shards) if shard is None else range(shard[0], plan.shards, shard[1])
    missing = [number for number in own if not get_shard_path(place, number).exists()]
    run = compute_shards if engine == "local" else compute_shards_with_ray
    for _ in watch(run(adapter, place, plan, scores, missing), len(missing)):
        pass
    if any(not get_shard_path(place, number).exists() for number in range(plan.shards)):
        return None
    return merge_atlas(place)


def check_sizes(
    tokens: int = TOKENS,
    queries: int = QUERIES,
    examples: int = EXAMPLES,
    shard_size: int = SHARD_SIZE,
    documents: int | None = None,
) -> None:
    """Raise ConfigError unless these numbers of `atlas` are within their bounds."""
    check_count("tokens", tokens, SHORTEST + 1, MOST)
    check_count("examples", examples, 1, MOST_EXAMPLES)
    for name, value in {"queries": queries, "shard_size": shard_size}.items():
        check_count(name, value, 1, MOST)
    if documents is not None:
        check_count("documents", documents, 1, MOST)


def check_inputs(source: Any, watch: Any) -> None:
    """Raise ConfigError unless the source is one of texts, and watch a function."""
    if not callable(watch):
        raise ConfigError(f"watch must be a function of the shards and their number, got {describe_value(watch)}.")
    if isinstance(source, bytes | dict) or not isinstance(source, str | Path | Iterable):
        raise ConfigError(f"source must be a file, a folder of files, or an iterable of texts, got {describe_value(source)}.")


def check_shard(shard: Any) -> None:
    """Raise ConfigError unless it is None or (i, n) with 0 <= i < n."""
    is_pair = isinstance(shard, tuple | list) and len(shard) == 2 and all(type(number) is int for number in shard)
    if shard is not None and not (is_pair and 0 <= shard[0] < shard[1]):
        raise ConfigError(f"shard must be (i, n) with 0 <= i < n, got {describe_value(shard)}.")


def merge_atlas(folder: str | Path) -> Heads:
    """Merge the shards of a folder, in their order, write its tables and pages, and return the table of heads.

    Raises DataError if a shard is missing or damaged.
    """
    merged = read_atlas(folder)
    check_content(merged.folder, merged.plan)
    documents, table = DocumentStore.open(merged.folder), merged.heads
    check_examples(merged.state, documents)
    write_tables(merged, documents, table)
    write_site(merged, documents, table)
    return table


def compute_shards(
    adapter: ModelAdapter, folder: Path, plan: AtlasSettings, scores: Sequence[UserScore], missing: Iterable[int]
) -> Iterator[int]:
    """Compute shards in this process, one after the other; yield each as it is done."""
    for shard in missing:
        compute_shard(adapter, folder, plan, scores, shard)
        yield shard


def compute_shards_with_ray(
    adapter: ModelAdapter, folder: Path, plan: AtlasSettings, scores: Sequence[UserScore], missing: Iterable[int]
) -> Iterator[int]:
    """Compute shards by Ray, as tasks of the plan's number of threads; yield each as it is done.

    The folder must be one that every machine of the cluster sees. Uses the cluster that this process is connected to, else
    starts one on this machine. Raises ConfigError if Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("engine 'ray' needs Ray: pip install 'regard[ray]'.") from None
    is_own_cluster = not ray.is_initialized()
    if is_own_cluster:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        task = ray.remote(num_cpus=plan.threads, max_retries=RETRIES)(compute_shard)
        shared = ray.put(adapter)
        pending = {task.remote(shared, folder.absolute(), plan, scores, shard): shard for shard in missing}
        while pending:
            (done,), _ = ray.wait(list(pending))
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, RegardError) else error from None
            yield pending.pop(done)
    finally:
        if is_own_cluster:
            ray.shutdown()


def compute_shard(adapter: ModelAdapter, folder: Path, plan: AtlasSettings, scores: Sequence[UserScore], shard: int) -> None:
    """Compute the statistics of a shard's documents and write its file."""
    before = set_threads(plan.threads)
    keep_freed_memory()
    try:
        documents = DocumentStore.open(folder)
        punctuation = {token: is_punctuation(text) for token, text in documents.pieces.items()}
        layers: list[tuple[str, int]] = []
        state: State = {}
        with evaluate_mode(adapter.model), torch.inference_mode():
            for document in plan.get_documents(shard):
                ids = documents[document]
                with record(adapter.model) as recording:
                    adapter.run(ids.unsqueeze(0))
                names = recording.layers()
                if not names:
                    raise ConfigError(f"{adapter.name} has no self-attention that record sees: {recording.missed}.")
                if not layers:
                    layers = [(name, recording.map(n).shape[1]) for n, name in enumerate(names)]
                    state = make_state(sum(heads for _, heads in layers), plan.examples, len(scores))
                marks = torch.tensor([punctuation[token] for token in ids.tolist()])
                queries, start = select_queries(len(ids), plan.queries, document), 0
                shared: list[tuple[Mask, VisibleKeys]] = []  # most models have one mask for all layers
                for n, (_, heads) in enumerate(layers):
                    found = score_rows(recording.map(n), ids, queries, marks, scores, shared)
                    add_rows(state, slice(start, start + heads), found, queries, document)
                    start += heads
        write_shard(folder, shard, plan, layers, state)
    finally:
        set_threads(before)
