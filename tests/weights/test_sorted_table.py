import struct

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from regard.weights import sorted_table
from weights import bundle

ENTRIES = st.dictionaries(st.binary(max_size=300), st.binary(max_size=300), max_size=40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=ENTRIES, in_block=st.integers(1, 17), restart=st.integers(1, 7))
def test_every_entry_comes_back_in_the_order_of_its_key(tmp_path, entries, in_block, restart):
    path = tmp_path / "t.index"
    path.write_bytes(bundle.table(entries, in_block, restart))
    assert list(sorted_table.read_entries(path)) == sorted(entries.items())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@example(place=1357, bit=0)
@example(place=1360, bit=7)
def test_one_changed_bit_anywhere_but_in_the_padding_is_noticed(tmp_path, place, bit):
    entries = {bytes([65 + n]) * 9: b"value" * n for n in range(20)}
    whole = bundle.table(entries, 6)
    footer = len(whole) - sorted_table.FOOTER
    handles = footer + len(whole[footer:-8].rstrip(b"\0"))
    start, after_start = sorted_table.read_varint(whole, footer)  # of the list of other blocks, which holds nothing
    size, after_size = sorted_table.read_varint(whole, after_start)
    place %= handles
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    path = tmp_path / "t.index"
    path.write_bytes(damaged)
    is_unused = start <= place < start + size + 5 or footer <= place < after_size  # 5: its type and checksum
    is_longer_form = (place, bit) == (handles - 1, 7)  # of the same number
    try:
        assert dict(sorted_table.read_entries(path)) == entries
        assert is_unused or is_longer_form
    except (ValueError, IndexError, struct.error):
        pass


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "last bytes"), (b"x" * 60, "last bytes"), (b"\xff" * 40 + struct.pack("<Q", sorted_table.MAGIC), "ten bytes")],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, sentence):
    (tmp_path / "t.index").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        list(sorted_table.read_entries(tmp_path / "t.index"))


def test_a_compressed_block_is_refused(tmp_path):
    content = bundle.block([(b"a", b"b")], 1)
    squeezed = content + b"\1" + struct.pack("<I", bundle.mask_checksum(content + b"\1"))
    index = bundle.block([(b"a", bundle.varint(0) + bundle.varint(len(content)))], 1)
    handles = bundle.varint(0) * 2 + bundle.varint(len(squeezed)) + bundle.varint(len(index))
    footer = handles.ljust(40, b"\0") + struct.pack("<Q", sorted_table.MAGIC)
    (tmp_path / "t.index").write_bytes(squeezed + bundle.append_checksum(index) + footer)
    with pytest.raises(ValueError, match="compressed"):
        list(sorted_table.read_entries(tmp_path / "t.index"))
