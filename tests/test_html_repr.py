"""A value asks whoever draws, and stays text where nobody does."""

import pytest

from regard.html_repr import HtmlRepr


class Value(HtmlRepr):
    pass


def test_where_nobody_draws_it_stays_text(monkeypatch):
    monkeypatch.setattr(HtmlRepr, "renderer", None)
    assert Value()._repr_html_() is None


def test_where_what_draws_cannot_be_imported_it_stays_text(monkeypatch):
    monkeypatch.setattr(HtmlRepr, "renderer", "regard.no_such_room")
    assert Value()._repr_html_() is None


def test_the_package_names_a_room_that_draws():
    import regard.show.notebook

    assert regard.show.notebook.__name__ == HtmlRepr.renderer


def test_a_fault_of_what_draws_is_not_hidden(monkeypatch):
    monkeypatch.setattr(HtmlRepr, "renderer", "regard.errors")  # which has no html
    with pytest.raises(AttributeError):
        Value()._repr_html_()
