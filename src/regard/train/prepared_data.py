"""The prepared data of a run that names its sources: written once into the run's folder, and again if the sources change."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import ConfigError, DataError
from regard.text.prepared_folder import Origin, read_origin
from regard.train.checkpoint_header import HEADER_NAME, list_checkpoint_folders, make_damage_error, read_header
from regard.train.config import TrainConfig, refuse_different_run

T = TypeVar("T")


def load_or_prepare(
    config: TrainConfig,
    names: tuple[str, ...],
    origin: Callable[[], Origin],
    load: Callable[[Path], T],
    prepare: Callable[[Path], T],
) -> T:
    """Return the data in out/corpus, prepared again if it was not made from these sources with these settings.

    Raises ConfigError if it was not, but the run has a checkpoint, which was trained on the existing data. If the sources no
    longer exist, data that was made from sources of these names is loaded.
    """
    folder = Path(config.out) / "corpus"
    stated, checkpoints = read_origin(folder), list_checkpoint_folders(folder.with_name("checkpoints"))
    if stated is None and checkpoints:  # written by an older version without source.json; the checkpoint identifies its corpus
        return load(folder)
    try:
        found = origin()
    except DataError:
        if stated is not None and stated.names == names:
            return load(folder)
        raise
    if found.is_origin_of(folder):
        return load(folder)
    if checkpoints:
        refuse_other_sources(config, checkpoints[-1], names)
    data = prepare(folder)
    found.write(folder)
    return data


def refuse_other_sources(config: TrainConfig, checkpoint: Path, names: tuple[str, ...]) -> None:
    """Raise ConfigError for sources, or settings, that the run with this checkpoint was not trained on."""
    former = read_config(checkpoint, read_header(checkpoint))
    refuse_different_run(former, replace(config, model=former.model), Path(config.out))
    raise ConfigError(
        f"{', '.join(names)}: the contents are not those that the run in {config.out} was trained on. Name another folder "
        "as out, or restore the former contents."
    )


def read_config(folder: Path, says: Mapping[str, Any]) -> TrainConfig:
    """Return the config in a checkpoint's run.json; raise DataError if it is invalid."""
    try:
        return TrainConfig.from_table(says["config"])
    except (ConfigError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise make_damage_error(folder / HEADER_NAME, f"its config is invalid: {error}") from None
