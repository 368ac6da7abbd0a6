import base64
import gzip
import html
import json
import re

import numpy as np
import pytest
import torch

import regard
from regard import Causal, ConfigError
from regard.map.codes import encode_weights
from regard.show.page import single_file
from show.page.server_client import TEXT, in_steps, record_sorter, rows_and_keys

ENTRY = re.compile(r'<script type="application/json" data-name="([^"]*)">"([A-Za-z0-9+/=]*)"</script>')
START = re.compile(r'<script type="application/json" id="regard-start">(.*?)</script>', re.DOTALL)
HEAD = "kind=self&part=&b=0&layer=1&head=2"


def entries(text):
    """The entries of a file by name, with r1 in place of the id of its recording."""
    return {
        re.sub(r"^[\w-]+/(?=\w+\?)", "r1/", html.unescape(name)): gzip.decompress(base64.b64decode(packed))
        for name, packed in ENTRY.findall(text)
    }


def picture(found, name, shape):
    return torch.from_numpy(np.frombuffer(found[name], "<u2").astype(np.int32)).view(shape)


class Grouped(torch.nn.Module):
    """Attention whose key heads serve several query heads."""

    def __init__(self, *given):
        super().__init__()
        self.given = given

    def forward(self):
        return torch.nn.functional.scaled_dot_product_attention(*self.given, is_causal=True, enable_gqa=True)


@pytest.fixture(scope="module")
def recording():
    return record_sorter(keep="values")


@pytest.fixture(scope="module")
def page_html(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    regard.page(recording, path)
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]
    return path.read_text(encoding="utf-8")


def test_it_holds_every_weight_of_every_head(page_html, recording):
    found, seen = entries(page_html), Causal().table(11, 11).reshape(11, 11)
    for layer in range(3):
        for head in range(3):
            name = f"r1/picture?kind=self&part=&b=0&layer={layer}&head={head}&level=0&how=mean"
            expected = encode_weights(recording.map(layer, head)[0, 0], seen).to(torch.int32)
            assert torch.equal(picture(found, name, (11, 11)), expected)


def test_it_holds_the_words_the_kinds_the_steps_and_the_examples(page_html, recording):
    found = entries(page_html)
    assert json.loads(found["r1/words?list=words&b=0"])["words"] == list(TEXT)
    *rows, last = [json.loads(line) for line in found["r1/heads?kind=self&part="].splitlines()]
    assert [line["row"]["kind"] for line in rows] == [row.kind for row in regard.heads(recording)]
    assert last["detectors"]
    assert json.loads(found[f"r1/open?{HEAD}"])["levels"] == 1
    assert json.loads(found[f"r1/steps?{HEAD}"])["rows"] == list(TEXT)
    assert {"example?name=simple", "example?name=heads", "example?name=heads&head=1"} <= set(found)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 32), (torch.float64, 64)])
def test_the_vectors_of_steps_have_every_digit_and_keys_that_heads_share_are_stored_once(tmp_path, dtype, bits):
    q, k, v = (torch.randn(1, heads, 7, 5, dtype=dtype, generator=torch.Generator().manual_seed(heads)) for heads in (6, 3, 2))
    k, v = k[:, :2], v[:, :2]
    layer = Grouped(q, k, v)
    with regard.record(layer, keep="values") as recording, torch.no_grad():
        layer()
    regard.page(recording, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = {name.partition("/")[2]: data for name, data in entries(text).items()}
    names = [name for name, _ in ENTRY.findall(text)]
    assert len(names) == len(set(names))
    for head in range(6):
        steps = json.loads(found[f"steps?kind=self&part=&b=0&layer=0&head={head}"])
        for name, exact in (("q", q[0, head]), ("k", k[0, head // 3]), ("v", v[0, head // 3])):
            told = steps[name]
            assert told["bits"] == bits
            stored = np.frombuffer(found[told["name"].partition("/")[2]], f"<f{bits // 8}").reshape(-1, told["columns"])
            assert np.array_equal(stored, exact.double().numpy())
    assert sum(name.startswith("numbers?") for name in found) == 6 + 2 + 2


def test_it_loads_nothing_from_anywhere(page_html):
    code = re.search(r'<script type="module">(.*?)</script>', page_html, re.DOTALL)[1]
    assert not re.findall(r'(?:src|href)="(?!data:,")', page_html.replace(code, ""))
    assert not re.search(r"^import\b|\bimport\(", code, re.MULTILINE)


def test_its_policy_names_its_own_scripts_by_their_digests(page_html):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page_html)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.search(r"script-src '[^' ]+';", policy)  # that one alone: no address, and no data: URL
    for inside in (r'<script type="module">(.*?)</script>', r"<style>(.*?)</style>"):
        assert single_file.compute_digest(re.search(inside, page_html, re.DOTALL)[1]) in policy


def test_words_cannot_end_the_element_that_they_are_in(tmp_path):
    recording = record_sorter()
    recording.tokens = ["</script><script>alert(1)</script>", "<!--", "\ud800", "\0", "\u2028", *"ABCABC"]
    regard.page(recording, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "alert(" not in text.replace("\\u003cscript>alert(1)\\u003c/script>", "")
    assert json.loads(START.search(text)[1])["recordings"][0]["words"]["words"]["first"][:5] == recording.tokens[:5]


@pytest.mark.slow
def test_beyond_the_limit_it_holds_the_levels_that_fit_and_says_so(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 600, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    recording = rows_and_keys(q, k)
    monkeypatch.setattr(single_file, "MAX_PICTURES_BYTES", 2 * 4 * (300**2 + 150**2))
    regard.page(recording, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = entries(text)
    levels = {name.partition("head=1&")[2] for name in found if "/picture?" in name} - {""}
    assert levels == {f"level={level}&how={how}" for level in (1, 2) for how in ("mean", "max")}
    expected = encode_weights(recording.map(0, 1).tile(slice(None), slice(None), 300, "max")[0, 0]).to(torch.int32)
    assert torch.equal(picture(found, "r1/picture?kind=self&part=&b=0&layer=0&head=1&level=1&how=max", (300, 300)), expected)
    assert "2 x 2 weights per pixel" in json.loads(START.search(text)[1])["recordings"][0]["notes"][0]


def test_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="got str"):
        regard.page("sorted.reg", tmp_path / "page.html")


def test_calls_that_are_joined_have_every_weight_in_it(tmp_path):
    recording = in_steps(dtype=torch.float32)
    regard.page(recording, tmp_path / "page.html")
    found = entries((tmp_path / "page.html").read_text(encoding="utf-8"))
    expected = encode_weights(recording.map(1, 3)[1, 0], Causal().table(13, 13).reshape(13, 13)).to(torch.int32)
    seen = picture(found, "r1/picture?kind=self&part=&b=1&layer=1&head=3&level=0&how=mean", (13, 13))
    assert (seen - expected).abs().max() <= 1  # a code is 3.4e-4 of a weight, and a last bit may decide which one is nearer


def test_each_text_of_a_batch_has_its_own_words(tmp_path):
    recording = in_steps()
    regard.page(recording, tmp_path / "page.html")
    found = entries((tmp_path / "page.html").read_text(encoding="utf-8"))
    stored = [json.loads(found[f"r1/words?list=words&b={row}"])["words"] for row in (0, 1)]
    assert stored == recording.tokens


def test_where_it_cannot_be_written_what_was_there_stays(tmp_path, recording, monkeypatch):
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr(single_file, "render_document", lambda *_: "\ud800")  # which UTF-8 has no bytes for
    with pytest.raises(UnicodeEncodeError):
        regard.page(recording, tmp_path / "page.html")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("page.html", "before")]
