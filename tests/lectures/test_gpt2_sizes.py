import pytest

from regard.lectures.gpt2_sizes import FIRST_VOCABULARY, VOCABULARY, count_parameters

SIZES = [(12, 768), (24, 1024), (36, 1280), (48, 1600)]


def test_the_smallest_has_the_parameters_that_openais_file_holds():
    assert count_parameters(12, 768, VOCABULARY) == 124_439_808


@pytest.mark.parametrize(("layers", "c"), SIZES)
def test_a_block_has_twelve_squares_and_thirteen_widths(layers, c):
    assert count_parameters(layers, c, VOCABULARY) == layers * (12 * c**2 + 13 * c) + (50_257 + 1_024) * c + 2 * c


def test_the_papers_counts_come_out_with_the_vocabulary_of_the_first_gpt_and_with_no_other():
    def counts(vocabulary):
        return [round(count_parameters(*size, vocabulary) / 1e6) for size in SIZES]

    assert counts(FIRST_VOCABULARY) == [117, 345, 762, 1542]
    assert counts(VOCABULARY) == [124, 355, 774, 1558]
