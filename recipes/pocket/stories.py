"""The stories of the corpus: files of JSON lines, one for each chunk, sampled from the narrator. Existing files are kept."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.pocket.narrator import Narrator, read_vocabulary
from regard.text.corpus import documents

CHUNK, ROWS = 8192, 256  # stories in a file, and how many are sampled at once
SEED = 20_000  # of the first chunk; chunk n has SEED + n
REPEAT_EVERY = 6  # one story in so many is repeated at once: only a head that looks back can predict it (induction)


def write_stories(data: Path, folder: Path, chunks: Iterable[int], dtype: torch.dtype, **sampling: Any) -> None:
    """Write the files of these chunks that are missing; `data` holds the narrator's two files.

    `sampling` are the settings of `Narrator.generate_stories`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [n for n in chunks if not get_chunk_path(folder, n).exists()]
    if not missing:
        return
    narrator, pieces = Narrator.load(data / "stories15M.bin", dtype), read_vocabulary(data / "tokenizer.bin")
    for n in missing:
        start = time.monotonic()
        stories = narrator.generate_stories(CHUNK, rows=ROWS, seed=SEED + n, **sampling)
        texts = [cut_at_sentence_end(b"".join(pieces[token] for token in story).decode(errors="ignore")) for story in stories]
        partial = get_chunk_path(folder, n).with_suffix(".part")
        partial.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text), encoding="utf-8")
        partial.rename(get_chunk_path(folder, n))
        print(f"stories {n}: {sum(map(len, texts)):,} letters, {time.monotonic() - start:.0f} s", flush=True)


def read_stories(folder: Path, chunks: int) -> Iterator[str]:
    """Yield the stories of all chunks, some of them twice in a row; none of the last chunk twice, because it is held out."""
    for n in range(chunks):
        for number, story in enumerate(documents(get_chunk_path(folder, n))):
            yield story
            if number % REPEAT_EVERY == 0 and n < chunks - 1:
                yield story


def get_chunk_path(folder: Path, n: int) -> Path:
    """Return the path of chunk n."""
    return folder / f"{n:03}.jsonl"


def cut_at_sentence_end(story: str) -> str:
    """Return a story up to its last complete sentence: the context cuts long ones in the middle of one."""
    complete = re.match(r"""(?s).*[.!?]"?(?=\s|$)""", story.strip())
    return complete.group() if complete else ""
