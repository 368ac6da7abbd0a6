"""The plan of an atlas: what is computed from which documents by which model, and the files of the shards."""

import filecmp
import json
import tempfile
from collections.abc import Sequence
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
from regard.head_atlas.documents import ENDS, PIECES, TOKENS, write_documents
from regard.head_atlas.statistics import State, make_state
from regard.observe.checksums import compute_checksums, compute_header_checksum
from regard.show.page.model_adapter import ModelAdapter
from regard.text.corpus.sources import Source, list_files

PLAN, SHARDS, LOCK = "atlas.json", "shards", ".atlas.lock"
FILES = (TOKENS, ENDS, PIECES)
BLOCK = 2**22  # bytes read at a time
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """The settings of an atlas; documents is their number, weights a checksum of the model's, checksum that of
    the corpus."""

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
    scores: list[str] = field(default_factory=list)  # names of those that the user gave
    documents: int = 0
    format: int = FORMAT

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.documents // self.shard_size)

    def get_documents(self, shard: int) -> range:
        """Return the numbers of the documents of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.documents))


def compute_weight_checksum(model: nn.Module) -> int:
    """Return a checksum of all parameters and buffers of a model."""
    return int(compute_header_checksum({key: str(value) for key, value in checksum_tensors(model).items()}, {}))


def checksum_tensors(model: nn.Module) -> dict[str, int]:
    """Return the checksum of each tensor of a model's state_dict."""
    return compute_checksums({name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)})


def describe_source(source: Source) -> tuple[str, int | None]:
    """Return the name of a corpus and the CRC-32 of its files; None if it does not consist of files."""
    if not isinstance(source, str | Path):
        return "documents", None
    checksum = 0
    for path in list_files(Path(source)):
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                checksum = crc32(block, checksum)
    return str(source), checksum


def make_plan(folder: Path, plan: Plan, source: Source, adapter: ModelAdapter) -> Plan:
    """Return the plan of a folder, writing it and its documents if there is none. Raises ConfigError if there is another."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK):
        if not (folder / PLAN).exists():
            with write_atomically(*(folder / name for name in (*FILES, PLAN))) as places:
                values = {**asdict(plan), "documents": write_plan_documents(places, plan, source, adapter)}
                places[-1].write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        elif plan.checksum is None:
            check_documents(folder, plan, source, adapter)
        found = read_plan(folder)
    for name, value in asdict(plan).items():
        came = getattr(found, name)
        if name != "documents" and came != value:
            raise ConfigError(
                f"{folder} is an atlas with {name} {came!r}, not {value!r}. Use the settings that it was begun with, or "
                "another folder."
            )
    (folder / SHARDS).mkdir(exist_ok=True)
    return found


def write_plan_documents(places: Sequence[Path], plan: Plan, source: Source, adapter: ModelAdapter) -> int:
    """Write the documents of a plan to three files, and return their number. Raises DataError."""
    settings: dict[str, Any] = {"tokens": plan.tokens, "begin": plan.begin, "most": plan.most}
    return write_documents(source, adapter.encode, adapter.decode, places, **settings)


def check_documents(folder: Path, plan: Plan, source: Source, adapter: ModelAdapter) -> None:
    """Raise ConfigError unless the documents of a folder are those of a source that does not consist of files."""
    with tempfile.TemporaryDirectory() as place:
        again = [Path(place) / name for name in FILES]
        write_plan_documents(again, plan, source, adapter)
        if any(not filecmp.cmp(path, folder / path.name, shallow=False) for path in again):
            raise ConfigError(f"{folder} is an atlas of other documents. Use those that it was begun with, or another folder.")


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder. Raises DataError."""
    try:
        return Plan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(f"{folder} holds no atlas: there is no {PLAN}.") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{folder / PLAN} cannot be read: {error}.") from None


def get_shard_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard's file."""
    return folder / SHARDS / f"{shard:06}.safetensors"


def write_shard(folder: Path, shard: int, plan: Plan, layers: list[tuple[str, int]], state: State) -> None:
    """Write the statistics of a shard; a file of a killed process is never found under this name."""
    body = {"plan": asdict(plan), "layers": layers, "tensors": compute_checksums(state)}
    checksum = compute_header_checksum({"body": json.dumps(body)}, state)
    metadata = {"atlas": json.dumps({"body": body, "checksum": checksum})}  # one entry: the order of several is not fixed
    with write_atomically(get_shard_path(folder, shard)) as (place,):
        place.write_bytes(save(state, metadata))


def read_shard(folder: Path, shard: int, plan: Plan) -> tuple[list[tuple[str, int]], State]:
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
    body = header["body"]
    altered = header["checksum"] != compute_header_checksum({"body": json.dumps(body)}, state)
    if altered or body["tensors"] != compute_checksums(state):
        raise DataError(f"shard {shard} was altered: its checksum is not that of its numbers. {remedy}")
    if body["plan"] != asdict(plan):
        raise DataError(f"shard {shard} is of an atlas with other settings. {remedy}")
    layers = [(str(name), int(heads)) for name, heads in body["layers"]]
    empty = make_state(sum(heads for _, heads in layers), plan.examples, len(plan.scores))
    if {name: x.shape for name, x in empty.items()} != {name: x.shape for name, x in state.items()}:
        raise DataError(f"shard {shard} was written by another version of regard. {remedy}")
    return layers, state


def read_header(data: bytes) -> dict[str, Any]:
    """Return the entry "atlas" of the metadata of a safetensors file, with body and checksum.

    Raises ValueError, KeyError or TypeError if there is none.
    """
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["atlas"])
    return {name: found[name] for name in ("body", "checksum")}


def set_threads(threads: int) -> int:
    """Set the number of torch's threads and return what it was."""
    before = torch.get_num_threads()
    if threads != before:
        torch.set_num_threads(threads)
    return before
