from types import SimpleNamespace

import pytest

from regard.observe.interception.patching import PatchSet


class Owner:
    kept = "original"


def test_patches_that_could_not_be_made_leave_nothing_behind_and_are_made_by_the_next_user():
    other = SimpleNamespace(first="original")
    failing = [True]

    def build():
        yield other, "first", "ours"
        if failing:
            raise OSError("a file was not there")
        yield Owner, "kept", "ours"

    patches = PatchSet(build)
    with pytest.raises(OSError, match="not there"), patches:
        pass
    assert other.first == Owner.kept == "original"
    failing.clear()
    with patches, patches:
        assert other.first == Owner.kept == "ours"
    assert other.first == Owner.kept == "original"
