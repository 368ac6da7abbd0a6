import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from regard import DataError
from regard.text import BytePair, byte_pair
from regard.text.byte_pair import GPT2_FOLDER

END = "<|endoftext|>"
LINES = ["the cat sat on the mat", "the dog sat on the cat", "naïve café — 東京 🦊", "a  b\n\n c\t1234 5's we'll"] * 3


@given(text=st.text())
def test_any_text_comes_back(text):
    words = BytePair.gpt2()
    assert words.decode(words.encode(text)) == text
    assert words.bytes(words.encode(text)) == text.encode()
    assert len(words.pieces(words.encode(text))) == len(words.encode(text))


@pytest.fixture(scope="module")
def theirs():
    return ByteLevelBPETokenizer(str(GPT2_FOLDER / "encoder.json"), str(GPT2_FOLDER / "vocab.bpe"))


@pytest.mark.slow
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_gpt2_cuts_texts_as_the_tokenizers_library_does(theirs, text):
    assert BytePair.gpt2().encode(text) == theirs.encode(text).ids


def test_a_special_token_is_plain_text_unless_it_is_allowed():
    words = BytePair.gpt2()
    assert words.end not in words.encode(f"a{END}b")
    assert words.encode(f"a{END}b", allowed=[END])[1] == words.end
    assert words.decode(words.encode(f"a{END}b")) == f"a{END}b"
    with pytest.raises(DataError, match="is not a special token"):
        words.encode("a", allowed=["<pad>"])


def test_half_a_character_is_shown_as_what_it_is():
    words = BytePair.gpt2()
    ids = words.encode("🦊")
    assert len(ids) > 1
    assert words.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert all(piece.startswith("\\x") for piece in words.pieces(ids))
    assert words.pieces(words.encode("a café")) == ["a", " café"] or "".join(words.pieces(words.encode("a café"))) == "a café"


@pytest.mark.parametrize("wrong", [[50257], [-1], [0.5], ["a"], [None]])
def test_a_number_that_stands_for_nothing_is_named(wrong):
    with pytest.raises(DataError, match="is not a token: they are numbered from 0 to 50256"):
        BytePair.gpt2().decode(wrong)


@pytest.mark.slow
def test_a_run_of_white_space_that_is_too_long_for_the_library_is_encoded_in_windows():
    words = BytePair.gpt2()
    for run, many in ((" ", 20), ("\n", 20)):
        short, long = (words.encode(f"a{run * count}{END}b", allowed=[END]) for count in (1 << 12, 1 << many))
        assert words.decode(long) == f"a{run * (1 << many)}{END}b"
        assert long[:1000] == short[:1000]
        assert long[-1000:] == short[-1000:]
        assert words.end in long


@given(text=st.text(st.sampled_from("ab 'sé\n🦊"), min_size=50), window=st.integers(40, 90))
def test_windows_change_no_token(text, window):
    words, text = BytePair.gpt2(), text * 40 + f"x{END}y"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_pair, "WINDOW", window)
        patch.setattr(byte_pair, "UNSURE", 8)
        for allowed in ((), (END,)):
            assert words._encode_in_windows(text, allowed) == words.encode(text, allowed)


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match="half of a surrogate pair at 1"):
        BytePair.gpt2().encode("a\ud83e")


def test_an_encoding_of_ones_own_joins_what_occurs_often(tmp_path):
    words = BytePair.train(LINES, 300)
    assert words.special == {END: words.vocabulary - 1}
    assert len(words.encode("the cat")) <= 2
    for line in [*LINES, "something else: ½"]:
        assert words.decode(words.encode(line)) == line
    assert max(words.encode("the cat sat")) < words.vocabulary


def test_an_encoding_comes_back_from_its_two_files_and_others_read_them(tmp_path):
    words = BytePair.train(LINES, 290)
    words.save(tmp_path)
    again = BytePair.load(tmp_path)
    theirs = ByteLevelBPETokenizer(str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe"))
    for line in LINES:
        assert words.encode(line) == again.encode(line) == theirs.encode(line).ids
    assert again.special == words.special


@pytest.mark.slow
def test_gpt2s_files_come_out_as_they_went_in(tmp_path):
    BytePair.gpt2().save(tmp_path)
    for name in ("vocab.bpe", "encoder.json"):
        ours, theirs = ((place / name).read_text(encoding="utf-8") for place in (tmp_path, GPT2_FOLDER))
        assert (json.loads(ours) == json.loads(theirs)) if name.endswith("json") else ours == theirs


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vocab.bpe", "#version: 0.2\na b c\n", "not a list of pairs"),
        ("vocab.bpe", "#version: 0.2\na \N{SNOWMAN}\n", "not a list of pairs"),
        ("vocab.bpe", b"\xff\xfe", "not a list of pairs"),
        ("vocab.bpe", "#version: 0.2\nq z\n", "has no number for 'qz'"),
        ("encoder.json", "{", "not a JSON object"),
        ("encoder.json", "[1]", "not a JSON object"),
        ("encoder.json", '{"a": "b"}', "not a JSON object"),
        ("encoder.json", '{"a": 0}', "has no number for"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, says):
    BytePair.train(LINES, 270).save(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=says):
        BytePair.load(tmp_path)


def test_files_whose_numbers_have_gaps_or_another_order_are_refused(tmp_path):
    words = BytePair.train(LINES, 270)
    words.save(tmp_path)
    numbers = json.loads((tmp_path / "encoder.json").read_text())
    joined = [word for word, number in numbers.items() if 256 <= number < words.vocabulary - 1]
    numbers[joined[0]], numbers[joined[1]] = numbers[joined[1]], numbers[joined[0]]
    (tmp_path / "encoder.json").write_text(json.dumps(numbers))
    with pytest.raises(DataError, match="in the order they are joined"):
        BytePair.load(tmp_path)
