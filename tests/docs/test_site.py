"""The site: every link of its gallery leads to a file, and each file holds the finding that the gallery states."""

import html
import re

import pytest
from docs.site import write_gallery

from regard.show.page.gallery import LEAK, list_gallery
from regard.show.page.session import Session
from show.page.server_client import make_sorter


@pytest.mark.slow
def test_each_item_of_the_gallery_is_a_file_that_the_index_links(tmp_path):
    session = Session(None, make_sorter())
    write_gallery(tmp_path, session)
    index = (tmp_path / "index.html").read_text()
    links = re.findall(r'href="(\w+)\.html#view=(\w+)&amp;find=clearest"', index)
    items = {item.name: item for item in list_gallery(session.adapter) if item.link is None}
    assert links == [(name, item.view) for name, item in items.items()]
    assert LEAK in items
    for name, item in items.items():
        entry, finding = session.make_item(item, lambda: None)
        assert html.escape(finding.sentences[0]) in index
        assert f'data-name="{entry.id}/finding"' in (tmp_path / f"{name}.html").read_text()
