import zipfile

import pytest

from regard import DataError
from regard.text.pairs.sources import read_pairs
from text.pairs.small_pairs import SAMPLE, write_pairs

LANGUAGES = ("en", "fr")


def sides(path):
    return [(one.source, one.target) for one in read_pairs(path, LANGUAGES)]


def table(pairs):
    return "".join(f"{one}\t{other}\tCC-BY 2.0: somebody\n" for one, other in pairs)


def test_the_same_pairs_come_from_aligned_files_from_a_table_and_from_an_archive(tmp_path):
    (tmp_path / "some.tsv").write_text(table(SAMPLE), encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("fra-eng/_about.txt", "who wrote it")
        archive.writestr("fra-eng/fra.txt", table(SAMPLE).replace("\n", "\r\n"))
    for path in (write_pairs(tmp_path, "some", SAMPLE), tmp_path / "some.tsv", tmp_path / "some.zip"):
        assert sides(path) == SAMPLE
        assert {one.part for one in read_pairs(path, LANGUAGES)} == {None}


def test_a_folder_gives_its_files_to_parts_by_their_names(tmp_path):
    for name, pair in zip(("train", "val", "test_2016_flickr", "notes"), SAMPLE, strict=False):
        write_pairs(tmp_path / "set", name, [pair])
    assert {(one.part, one.source) for one in read_pairs(tmp_path / "set", LANGUAGES)} == {
        ("train", SAMPLE[0][0]),
        ("valid", SAMPLE[1][0]),
        ("test", SAMPLE[2][0]),
    }


def test_white_space_of_any_kind_is_one_space_and_empty_sides_are_no_pairs(tmp_path):
    (tmp_path / "some.tsv").write_text("Run! \tCours\u202f!\n\u00a0\tRien\nNothing\t\n\n a  b\tc d\n", encoding="utf-8")
    assert sides(tmp_path / "some.tsv") == [("Run!", "Cours !"), ("a b", "c d")]


def test_files_of_unequal_lengths_are_refused_with_both_numbers(tmp_path):
    path = write_pairs(tmp_path, "some", SAMPLE)
    (tmp_path / "some.fr").write_text("Un homme dort.\n")
    with pytest.raises(DataError, match=r"some\.en has 5 lines and .*some\.fr 1:"):
        sides(path)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("some.tsv", b"no tab here\n", r"some\.tsv:1 has no tab"),
        ("some.tsv", b"a\tb\n\xff\tc\n", "not UTF-8 text: invalid start byte at byte 4"),
        ("some.zip", b"PK", "is not a readable archive"),
        ("some.pdf", b"", "is not sentence pairs: give a folder of"),
    ],
)
def test_what_holds_no_pairs_is_refused(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=says):
        sides(tmp_path / name)


def test_a_folder_without_a_training_part_and_an_archive_of_two_tables_are_refused(tmp_path):
    write_pairs(tmp_path / "set", "test", SAMPLE)
    with pytest.raises(DataError, match=r"has no train\.en"):
        sides(tmp_path / "set")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.txt", "a\tb\n")
        archive.writestr("b.txt", "a\tb\n")
    with pytest.raises(DataError, match=r"must have one file .* it has 2"):
        sides(tmp_path / "two.zip")
