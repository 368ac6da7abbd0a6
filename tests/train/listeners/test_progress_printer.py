import io
from dataclasses import replace

import pytest

from regard.models import GPT2Config
from regard.train import begin, follow
from regard.train.listeners.progress_printer import ProgressPrinter
from train import small_runs


def train_and_print(folder, out, monkeypatch, width=80, **settings) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    training, page = begin(small_runs.config(folder, out=str(out), checkpoint_every=0, **settings)), io.StringIO()
    follow(training, [ProgressPrinter(1e9, page)])
    return page.getvalue().splitlines()


@pytest.mark.slow
def test_the_first_the_looked_at_and_the_last_step_have_a_line(folder, tmp_path, monkeypatch):
    titles, *lines = train_and_print(folder, tmp_path, monkeypatch)
    assert titles.split() == ["step", "loss", "held", "out", "tokens/s", "of", "peak", "left"]
    assert [line.split()[0] for line in lines] == ["1", "3", "6", "7"]
    assert lines[-1].endswith("0:00")
    assert {len(line) for line in lines} == {len(titles)}


@pytest.mark.slow
@pytest.mark.parametrize("width", [10, 20, 40, 46, 60, 80])
def test_no_line_is_wider_than_the_screen(folder, tmp_path, monkeypatch, width):
    lines = train_and_print(folder, tmp_path, monkeypatch, width, sample_every=1, sample_tokens=10)
    assert max(map(len, lines)) <= width
    assert "step" in lines[0]


@pytest.mark.slow
def test_the_share_of_the_peak_is_that_of_the_multiplications_done(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    training, page = begin(small_runs.config(folder, out=str(tmp_path), checkpoint_every=0)), io.StringIO()
    follow(
        training, [ProgressPrinter(1e4 * training.config.model.training_flops, page)]
    )  # the model that the corpus's vocabulary gives
    for line in page.getvalue().splitlines()[1:]:
        cells = line.replace(",", "").split()
        place = next(n for n, cell in enumerate(cells) if cell.endswith("%"))  # the time left is not known at first
        pace, share = int(cells[place - 1]), int(cells[place].rstrip("%"))
        assert share == pytest.approx(pace / 100, abs=1)  # both are printed as whole numbers


def test_training_on_a_token_takes_six_operations_a_parameter_and_those_of_attention():
    config = GPT2Config.small()
    products = sum(config.parts[name] for name in ("token embedding", "attention", "feed-forward"))
    attention = 12 * 12 * 768 * 1024 / 2  # two products of two, forward and twice backward, half of the square hidden
    assert config.training_flops == pytest.approx(6 * products + attention, rel=2e-3)  # biases and half a diagonal are beside


def test_skipped_batches_and_samples_are_reported_and_control_no_terminal(folder, tmp_path, monkeypatch):
    training, page = begin(small_runs.config(folder, out=str(tmp_path), steps=1)), io.StringIO()

    def print_changed_report(training, report):
        report = replace(report, skipped="the loss is nan", sample="a\x1b[2Jb\nc")
        ProgressPrinter(0.0, page)(training, report)

    follow(training, [print_changed_report])
    assert page.getvalue().splitlines()[-3:] == ["  step 1, batch 0, is skipped: the loss is nan", "  a\\x1b[2Jb", "  c"]


@pytest.mark.parametrize("width", [10, 23, 37])
def test_texts_are_broken_between_words_and_keep_their_lines(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    page, text = io.StringIO(), "  step 5, batch 4, is skipped: the loss is 2.71\n\nMom said no."
    ProgressPrinter(0.0, page).print_text(text)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(page.getvalue().split(" ")).count("\n\n") == 1
    assert page.getvalue().split() == text.split()
    assert lines[0].startswith("    step")  # the text's own indentation stays
