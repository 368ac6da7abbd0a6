"""Modules that call attention several times in one forward, without a joined map: each call as a layer of its own."""

from dataclasses import replace

from regard.errors import ConfigError
from regard.observe.recorded_runs.part_names import join_names, name_call
from regard.observe.recorded_runs.run import Call, HistoryKey
from regard.observe.recording import Recording
from regard.observe.stored_calls.joined_maps import join_maps

NOTE = (
    "{}: several calls of attention in one forward, each a layer of its own here, so that layers have other numbers than in "
    "recording.map."
)


def split_calls(recording: Recording) -> tuple[Recording, tuple[str, ...]]:
    """Return a recording whose last run has a layer for each call that has no joined map, and a note that names the modules.

    The layers are named `module, call 1`. Without such calls it is the recording itself, without a note.
    """
    run = recording.last
    visits: dict[tuple[str, str, int], list[HistoryKey]] = {}
    for key in run.histories:
        visits.setdefault(key[:3], []).append(key)
    named = {
        key: name_call(key[0], number)
        for keys in visits.values()
        if len(keys) > 1 and not has_joined_map(recording, keys)
        for number, key in enumerate(keys, 1)
    }
    if not named:
        return recording, ()
    new = {key: replace(one, name=named[key], links=None) if key in named else one for key, one in run.histories.items()}
    histories = {(new[key].name, key[1], key[2], 0 if key in named else key[3]): new[key] for key in run.histories}
    changed = {id(history): new[key] for key, history in run.histories.items()}
    calls = [replace(one, history=changed[id(one.history)]) if isinstance(one, Call) else one for one in run.calls]
    note = NOTE.format(join_names(list(dict.fromkeys(key[0] for key in named))))
    new_run = replace(run, histories=histories, calls=calls)
    return replace(recording, runs=[new_run if one is run else one for one in recording.runs]), (note,)


def has_joined_map(recording: Recording, keys: list[HistoryKey]) -> bool:
    """Return whether the calls of a visit are one map."""
    try:
        join_maps([recording.last.histories[key] for key in keys])
    except ConfigError:
        return False
    return True
