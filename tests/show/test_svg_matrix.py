import base64
from xml.etree import ElementTree

import pytest
import torch

from regard.show.color_scale import LinearScale, Log
from regard.show.svg_matrix import SHADES, Matrix, render_img
from show.elements import EVIL, Page, pixels


@pytest.mark.parametrize("scale", [LinearScale(), Log()])
def test_a_pixel_is_the_share_of_its_value_on_either_scale(scale):
    values = torch.tensor([[0.001, 0.02, 0.3], [torch.nan, 1.0, 0.5]], dtype=torch.float64)
    page = Page(render_img(Matrix(values, None, None, scale, (0.001, 1.0), (2, 3)), "name"))
    found = pixels(page.all("img")[0])
    expected = [
        [round(scale.share(value, (0.001, 1.0)) * (SHADES - 1)) if value == value else SHADES for value in row]
        for row in values.tolist()
    ]
    assert found.tolist() == expected


def test_words_beside_a_picture_are_text_in_it_whatever_they_hold():
    words = [word.replace("\x00", "0").replace("\ud800", "") for word in EVIL]
    page = Page(render_img(Matrix(torch.ones(9, 9), words, words, LinearScale(), (0.0, 1.0), (9, 9)), EVIL[1]))
    picture = ElementTree.fromstring(base64.b64decode(page.all("img")[0]["src"].partition(",")[2]))
    told = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert told[:4] == ["</script>", "<script>said=…", "&amp;", "<img src=x on…"]
    assert page.all("img")[0]["alt"] == EVIL[1]
