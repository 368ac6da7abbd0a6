"""The plan of an atlas: what is computed from which documents by which model, and the files of the shards."""

import filecmp
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from zlib_ng.zlib_ng import crc32

from regard.atomic_write import write_atomically
from regard.errors import ConfigError, DataError
from regard.head_atlas.documents import ENDS, PIECES, TOKENS, DocumentStore, write_documents
from regard.head_atlas.statistics import State, make_state
from regard.observe.files.checksums import compute_checksums, compute_header_checksum, find_altered_tensor
from regard.show.page.model_adapter import ModelAdapter
from regard.text.corpus.sources import Source, list_files

PLAN, SHARDS, LOCK = "atlas.json", "shards", ".atlas.lock"
FILES = (TOKENS, ENDS, PIECES)
BLOCK = 2**22  # bytes read at a time
MOST = 2**31 - 1
FORMAT = 1
COUNTS = ("tokens", "queries", "examples", "shard_size", "threads", "documents")
OF_DOCUMENTS = ("documents", "content")  # fields that are known when the documents are written
SETTING_NAMES = {  # of the fields of a plan that a user knows by another name
    "most": "documents",
    "weights": "weights whose checksum is",
    "checksum": "texts whose checksum is",
    "begin": "begin token",
}


@dataclass(frozen=True)
class AtlasSettings:
    """The settings of an atlas; documents is their number, weights a checksum of the model's, checksum that of the corpus.

    content is that of the files of the documents, None in an atlas of before there was one.
    """

    model: str
    weights: int
    corpus: str
    checksum: int | None
    tokens: int
    most: int | None
    queries: int
    examples: int
    shard_size: int
    threads: int
    begin: int | None
    scores: list[list[str]] = field(default_factory=list)  # name and docstring of each that the user gave
    documents: int = 0
    content: int | None = None
    format: int = FORMAT

    @property
    def definitions(self) -> dict[str, str]:
        """The docstrings of the scores that the user gave, by name."""
        return {str(name): str(definition) for name, definition in self.scores}

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.documents // self.shard_size)

    def get_documents(self, shard: int) -> range:
        """Return the numbers of the documents of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.documents))


def compute_weight_checksum(model: nn.Module) -> int:
    """Return a checksum of all parameters and buffers of a model."""
    checksums = compute_checksums({name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)})
    return int(compute_header_checksum({name: str(value) for name, value in checksums.items()}, {}))


def describe_source(source: Source) -> tuple[str, int | None]:
    """Return the name of a corpus and the CRC-32 of its files; None if it does not consist of files."""
    if not isinstance(source, str | Path):
        return "documents", None
    return str(source), compute_file_checksum(list_files(Path(source)))


def compute_file_checksum(paths: Iterable[Path]) -> int:
    """Return the CRC-32 of files, one after the other."""
    checksum = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                checksum = crc32(block, checksum)
    return checksum


def make_plan(folder: Path, plan: AtlasSettings, source: Source, adapter: ModelAdapter) -> AtlasSettings:
    """Return the plan of a folder, writing it and its documents if there is none. Raises ConfigError if there is another."""
    created = [place for place in (folder / LOCK, folder, *folder.parents) if not place.exists()]
    make_folder(folder)
    with FileLock(folder / LOCK), remove_on_error(folder, created):
        make_folder(folder)  # again, where a process that held the lock removed it
        if not (folder / PLAN).exists():
            with write_atomically(*(folder / name for name in (*FILES, PLAN))) as places:
                number = write_plan_documents(places, plan, source, adapter)
                values = {**asdict(plan), "documents": number, "content": compute_file_checksum(places[:-1])}
                places[-1].write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        elif plan.checksum is None:
            check_documents(folder, plan, source, adapter)
        found = read_plan(folder)
        check_content(folder, found)
    for name, value in asdict(plan).items():
        came = getattr(found, name)
        if name not in OF_DOCUMENTS and came != value:
            setting = SETTING_NAMES.get(name, name)
            raise ConfigError(
                f"{folder} is an atlas with {setting} {came!r}, not {value!r}. Use the settings that it was begun with, or "
                "another folder."
            )
    (folder / SHARDS).mkdir(exist_ok=True)
    return found


def make_folder(folder: Path) -> None:
    """Make the folder of an atlas if there is none. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be the folder of an atlas: {error.strerror}.") from None


@contextmanager
def remove_on_error(folder: Path, created: Sequence[Path]) -> Iterator[None]:
    """Remove the lock and the folders that were created for a plan if an error leaves the context without one."""
    try:
        yield
    except BaseException:
        if not (folder / PLAN).exists():
            with suppress(OSError):  # a folder that another process uses is not empty
                for place in created:
                    place.rmdir() if place.is_dir() else place.unlink()
        raise


def write_plan_documents(places: Sequence[Path], plan: AtlasSettings, source: Source, adapter: ModelAdapter) -> int:
    """Write the documents of a plan to three files, and return their number. Raises DataError."""
    settings: dict[str, Any] = {"tokens": plan.tokens, "begin": plan.begin, "most": plan.most}
    return write_documents(source, adapter.encode, adapter.decode, places, **settings)


def check_documents(folder: Path, plan: AtlasSettings, source: Source, adapter: ModelAdapter) -> None:
    """Raise ConfigError unless the documents of a folder are those of a source that does not consist of files."""
    with tempfile.TemporaryDirectory() as place:
        again = [Path(place) / name for name in FILES]
        write_plan_documents(again, plan, source, adapter)
        if any(not filecmp.cmp(path, folder / path.name, shallow=False) for path in again):
            raise ConfigError(f"{folder} is an atlas of other documents. Use those that it was begun with, or another folder.")


def check_content(folder: Path, plan: AtlasSettings) -> None:
    """Raise DataError unless the documents in a folder are those that were written with its plan."""
    documents = DocumentStore.open(folder)
    if len(documents) != plan.documents:
        raise DataError(f"{folder / PLAN} was altered: it says {plan.documents} documents, and there are {len(documents)}.")
    if plan.content not in (None, compute_file_checksum(folder / name for name in FILES)):
        raise DataError(f"{', '.join(FILES)} in {folder} were altered: their checksum is not that of the plan.")
    if not documents.has_all_pieces():
        raise DataError(f"{PIECES} in {folder} was altered: a token of the documents is not in it.")


def read_plan(folder: Path) -> AtlasSettings:
    """Read the plan of a folder. Raises DataError."""
    try:
        plan = AtlasSettings(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
        check_plan(plan)
        return plan
    except FileNotFoundError:
        raise DataError(f"{folder} holds no atlas: there is no {PLAN}.") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{folder / PLAN} cannot be read: {error}.") from None


def check_plan(plan: AtlasSettings) -> None:
    """Raise ValueError or TypeError unless the counts of a plan are numbers from 1, and its names are strings."""
    for name in COUNTS:
        if type(count := getattr(plan, name)) is not int or not 1 <= count <= MOST:
            raise ValueError(f"{name} must be a whole number from 1 to {MOST}, got {count!r}")
    if not isinstance(plan.scores, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in plan.scores):
        raise ValueError("scores must be a list of names with docstrings")
    texts = [plan.model, plan.corpus, *(text for pair in plan.scores for text in pair)]
    "".join(texts).encode()  # all are texts, and none has half of a surrogate pair


def get_shard_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard's file."""
    return folder / SHARDS / f"{shard:06}.safetensors"


def write_shard(folder: Path, shard: int, plan: AtlasSettings, layers: list[tuple[str, int]], state: State) -> None:
    """Write the statistics of a shard; a file of a killed process is never found under this name."""
    body = {"plan": asdict(plan), "layers": layers, "tensors": compute_checksums(state)}
    checksum = compute_header_checksum({"body": json.dumps(body)}, state)
    metadata = {"atlas": json.dumps({"body": body, "checksum": checksum})}  # one entry: the order of several is not fixed
    with write_atomically(get_shard_path(folder, shard)) as (place,):
        place.write_bytes(save(state, metadata))


def read_shard(folder: Path, shard: int, plan: AtlasSettings) -> tuple[list[tuple[str, int]], State]:
    """Return the layers and the statistics of a shard. Raises DataError if it is damaged or of another atlas."""
    path = get_shard_path(folder, shard)
    remedy = f"Remove {path} and run the same command again."
    try:
        data = path.read_bytes()
        header, state = read_header(data), load(data)
    except FileNotFoundError:
        raise DataError(
            f"shard {shard} of {plan.shards} is missing in {folder}: run the command that made the others."
        ) from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"shard {shard} cannot be read: {error}. {remedy}") from None
    if header["checksum"] != compute_header_checksum({"body": header["written"]}, state):
        raise DataError(f"shard {shard} was altered: its checksum is not that of its header. {remedy}")
    try:
        layers, of, checksums = parse_body(header["body"])
        altered = find_altered_tensor(state, checksums)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"shard {shard} cannot be read: {error}. {remedy}") from None
    if altered is not None:
        raise DataError(f"shard {shard} was altered: the checksum of {altered} is not that of its numbers. {remedy}")
    if of != plan:
        raise DataError(f"shard {shard} is of an atlas with other settings. {remedy}")
    with torch.device("meta"):
        empty = make_state(sum(heads for _, heads in layers), plan.examples, len(plan.scores))
    if {name: (x.shape, x.dtype) for name, x in empty.items()} != {name: (x.shape, x.dtype) for name, x in state.items()}:
        raise DataError(f"shard {shard} was written by another version of regard. {remedy}")
    if any((x < 0).any() for x in state.values() if not x.is_floating_point()):
        raise DataError(f"shard {shard} was altered: it has a negative count. {remedy}")
    return layers, state


def read_header(data: bytes) -> dict[str, Any]:
    """Return the entry "atlas" of the metadata of a safetensors file: body, body as it is written, and checksum.

    Raises ValueError, KeyError or TypeError if there is none.
    """
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["atlas"])
    return {"body": found["body"], "written": json.dumps(found["body"]), "checksum": found["checksum"]}


def parse_body(body: Any) -> tuple[list[tuple[str, int]], AtlasSettings, Any]:
    """Return the layers with their numbers of heads, the plan and the checksums of a shard.

    Raises ValueError, KeyError or TypeError for anything else.
    """
    layers = [(name, heads) for name, heads in body["layers"]]
    "".join(name for name, _ in layers).encode()  # all are texts, and none has half of a surrogate pair
    if not all(type(heads) is int and 1 <= heads <= MOST for _, heads in layers):
        raise ValueError(f"a layer must have from 1 to {MOST} heads")
    return layers, AtlasSettings(**body["plan"]), body["tensors"]


def set_threads(threads: int) -> int:
    """Set the number of torch's threads and return what it was."""
    before = torch.get_num_threads()
    if threads != before:
        torch.set_num_threads(threads)
    return before
