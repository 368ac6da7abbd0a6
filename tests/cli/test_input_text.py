import io

import pytest

from regard.cli.input_text import read_exact_text, read_text
from regard.errors import DataError

TEXT = "Tom had a ball.\r\nHe ran.\r\n"


@pytest.mark.parametrize("read", [lambda path: read_text(str(path)), read_exact_text])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, read):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(TEXT.encode())
    marked.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert read(marked) == read(plain)
    assert not read(plain).startswith("\ufeff")


def test_a_byte_order_mark_of_standard_input_is_no_part_of_a_text(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffTom ran."))
    assert read_text("-") == "Tom ran."

    monkeypatch.setattr("sys.stdin", io.StringIO("Tom\udcff"))
    with pytest.raises(DataError, match="standard input is not UTF-8 text: its character 3"):
        read_text("-")


@pytest.mark.parametrize("read", [lambda path: read_text(str(path)), read_exact_text])
def test_what_is_not_utf_8_is_named_with_its_byte(tmp_path, read):
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"text\.txt is not UTF-8 text: .* at byte 3\."):
        read(tmp_path / "text.txt")
