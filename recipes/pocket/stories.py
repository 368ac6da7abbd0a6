"""The corpus: stories that the narrator tells, in files of JSON lines, a chunk at a time; a chunk that is there is left."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.pocket.narrator import Narrator, words
from regard.text.corpus import documents

CHUNK, ROWS = 8192, 256  # stories a file, and how many are told side by side
SEED = 20_000  # of the first chunk; each has a seed of its own
AGAIN = 6  # every so many stories one is told twice in a row, which only a head that looks back can foretell: induction


def write(data: Path, folder: Path, chunks: Iterable[int]) -> None:
    """Files of stories in a folder, by their numbers, told by the narrator whose two files lie in `data`."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [n for n in chunks if not place(folder, n).exists()]
    if not missing:
        return
    narrator, pieces = Narrator.load(data / "stories15M.bin"), words(data / "tokenizer.bin")
    for n in missing:
        began = time.monotonic()
        told = narrator.stories(CHUNK, rows=ROWS, seed=SEED + n)
        texts = [finished(b"".join(pieces[token] for token in story).decode(errors="ignore")) for story in told]
        aside = place(folder, n).with_suffix(".part")
        aside.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text), encoding="utf-8")
        aside.rename(place(folder, n))
        print(f"stories {n}: {sum(map(len, texts)):,} letters, {time.monotonic() - began:.0f} s", flush=True)


def told(folder: Path, chunks: int) -> Iterator[str]:
    """The stories of all chunks, some of them twice in a row; none of the last chunk, of which some are held out."""
    for n in range(chunks):
        for number, story in enumerate(documents(place(folder, n))):
            yield story
            if number % AGAIN == 0 and n < chunks - 1:
                yield story


def place(folder: Path, n: int) -> Path:
    """The file of a chunk."""
    return folder / f"{n:03}.jsonl"


def finished(story: str) -> str:
    """A story up to its last whole sentence: the context cuts the long ones in the middle of one."""
    whole = re.match(r"""(?s).*[.!?]"?(?=\s|$)""", story.strip())
    return whole.group() if whole else ""
