from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba", reason="numba is not installed: pip install regard[fast]")

from regard.compiled.kept import Entries


def test_what_several_keep_at_once_is_never_taken_for_something_else(tmp_path):
    def keep(name: str) -> None:
        entries = Entries(str(tmp_path), "function", "a stamp")
        for n in range(40):
            entries.save((name, n), (name, n))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(keep, "abc"))
    entries = Entries(str(tmp_path), "function", "a stamp")
    found = {key: entries.load(key) for key in ((name, n) for name in "abc" for n in range(40))}
    assert {key: one for key, one in found.items() if one not in (None, key)} == {}
    assert any(found.values())  # what is lost is compiled again
