"""Prepare a corpus: encode texts with several processes, and write the tokens into a folder that is complete or absent."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from regard.errors import ConfigError, DataError
from regard.text.byte_pair import END
from regard.text.corpus.columns import Column, ColumnWriter, Numbers
from regard.text.corpus.corpus import Corpus, CorpusIndex
from regard.text.corpus.sources import BLOCK, DocumentPart, Source, count_bytes, iterate_parts
from regard.text.prepared_folder import Tokenizer, compute_tokenizer_checksums, replace_folder

CHUNKS_BEFORE_WORKERS = 64  # chunks that one process encodes in the time that it takes to start others
STARTS_NAME = "documents.npy"

Chunk = list[DocumentPart]
Encoded = tuple[Numbers, list[int]]  # the tokens of a chunk, and the number of tokens of each part
Progress = Callable[[int, int | None], None]


def prepare(
    source: Source,
    text: Tokenizer,
    folder: str | Path,
    *,
    field: str = "text",
    workers: int | None = None,
    shard: int = 2**25,
    progress: Progress | None = None,
) -> Corpus:
    """Write the corpus of a source's documents, each followed by the end-of-text token if the encoding has one.

    source is a file or folder, or yields strings or rows: see regard.text.corpus.sources. The encoding is saved in the folder
    too. A former corpus in the folder is replaced; any other folder that is not empty is refused. workers is the number of
    processes that encode, by default the number of cores if the source is large; the result is the same for any number. shard
    is the number of tokens per file. progress is called with the bytes read so far and, if the source consists of files, their
    total.
    """
    if shard < 1 or (workers is not None and workers < 1):
        raise ConfigError(f"shard and workers must be at least 1, got shard={shard}, workers={workers}.")
    folder = Path(folder)
    with replace_folder(folder, CorpusIndex.list_files) as partial:
        text.save(partial)
        chunks = encode_chunks(group_parts(iterate_parts(source, field, text.find_cut)), text, workers)
        index = write_shards(partial, chunks, text, shard, progress, count_bytes(source))
        index.write(partial)
    return Corpus(folder, text, index, 0, index.tokens)


def group_parts(pieces: Iterable[DocumentPart]) -> Iterator[Chunk]:
    """Yield parts in chunks of about one block of text."""
    chunk: Chunk = []
    size = 0
    for part in pieces:
        chunk.append(part)
        size += len(part.text)
        if size >= BLOCK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_chunks(chunks: Iterator[Chunk], text: Tokenizer, workers: int | None) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield each chunk in order with its tokens; encoded by several processes if requested, or if there are many chunks."""
    if workers is None:
        first_chunks = list(islice(chunks, CHUNKS_BEFORE_WORKERS))
        next_chunk = list(islice(chunks, 1))
        chunks, workers = chain(first_chunks, next_chunk, chunks), count_cores() if next_chunk else 1
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, text)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initialize_worker, (text,))
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(encode_in_worker, chunk)))
            if len(waiting) > 2 * workers:  # as many in memory as keep all of them busy
                yield waiting[0][0], waiting.popleft()[1].result()
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()
    except BrokenProcessPool:
        raise ConfigError(
            "an encoding process ended immediately. A script that prepares a corpus needs its work under "
            '`if __name__ == "__main__":`, because each process reads the script again; or use workers=1.'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def initialize_worker(text: Tokenizer) -> None:
    """Initialize a worker process: store the encoding, and leave Ctrl-C to the parent process."""
    global worker_tokenizer
    worker_tokenizer = text
    signal.signal(signal.SIGINT, signal.SIG_IGN)


worker_tokenizer: Tokenizer | None = None  # the encoding of a worker process


def encode_in_worker(chunk: Chunk) -> Encoded:
    """Return the tokens of a chunk, in an initialized worker process."""
    assert worker_tokenizer is not None
    return encode_chunk(chunk, worker_tokenizer)


def encode_chunk(chunk: Chunk, text: Tokenizer) -> Encoded:
    """Return the concatenated tokens of a chunk's parts, and the number of tokens of each part."""
    end = [text.special[END]] if END in text.special else []
    found = []
    for part in chunk:
        try:
            ids = text.encode(part.text)
        except DataError as error:
            raise DataError(f"{part.place}: {error}") from None
        found.append(np.array(ids + end if part.ends else ids, choose_dtype(text)))
    return np.concatenate(found), [len(ids) for ids in found]


def choose_dtype(text: Tokenizer) -> str:
    """Return the smallest dtype that holds a vocabulary."""
    return "<u2" if text.vocabulary <= 1 << 16 else "<u4"


def write_shards(
    folder: Path,
    chunks: Iterator[tuple[Chunk, Encoded]],
    text: Tokenizer,
    shard: int,
    progress: Progress | None,
    total_bytes: int | None,
) -> CorpusIndex:
    """Write the tokens into shards as they come, and the positions where documents start; return the index."""
    shards: list[Column] = []
    starts, open_shard = (
        ColumnWriter(folder / STARTS_NAME, "<i8"),
        ColumnWriter(folder / make_shard_name(0), choose_dtype(text)),
    )
    tokens, done, begins = 0, 0, True  # begins: whether the next part begins a document
    try:
        for chunk, (ids, sizes) in chunks:
            before = np.cumsum([tokens, *sizes])[:-1]
            starts.append(before[np.array([begins, *(part.ends for part in chunk[:-1])])])
            begins = chunk[-1].ends
            while len(ids):
                if open_shard.count == shard:
                    shards.append(open_shard.close())
                    open_shard = ColumnWriter(folder / make_shard_name(len(shards)), choose_dtype(text))
                part = ids[: shard - open_shard.count]
                open_shard.append(part)
                tokens, ids = tokens + len(part), ids[len(part) :]
            done += sum(part.size for part in chunk)
            if progress is not None:
                progress(done, total_bytes)
        if not tokens:
            raise DataError("the source has no text: every document of it is empty, or white space.")
        columns = (*shards, open_shard.close())
        return CorpusIndex(tokens, starts.count, text.vocabulary, columns, starts.close(), compute_tokenizer_checksums(folder))
    finally:
        starts.abandon()
        open_shard.abandon()


def make_shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"tokens-{number:05d}.npy"
