"""Pictures as data files and messages name them."""

from __future__ import annotations

import base64

import pytest

from host.pictures import MAX_BYTES, UnreadablePicture, read_picture, source_of
from tests.support.pictures import picture


def test_picture_is_a_file_beside_the_data_or_a_data_url(tmp_path):
    file = picture(0)
    (tmp_path / "my cat.png").write_bytes(file)
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    parts = [
        {"type": "image", "image": "my cat.png"},
        {"type": "image", "path": str(tmp_path / "my cat.png")},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/my%20cat.png"}},
        {"type": "image_url", "image_url": url},
    ]
    sources = [source_of(part, tmp_path, "line 1") for part in parts]
    assert sources == [str(tmp_path / "my cat.png")] * 3 + [url]
    assert {read_picture(source) for source in sources} == {file}


def test_picture_is_read_as_it_is_now(tmp_path):
    file = tmp_path / "a.png"
    for seed in (0, 1):
        file.write_bytes(picture(seed))
        assert read_picture(str(file)) == picture(seed)
    file.write_bytes(picture(0))
    assert read_picture(str(file)) is read_picture(str(file))  # a group keeps it once
    file.unlink()
    with pytest.raises(UnreadablePicture, match=r"a.png' cannot be read .No such file"):
        read_picture(str(file))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image", "image": "none.png"}, "cannot be read .No such file or directory"),
        ({"type": "image", "image": "text.png"}, "cannot be used: .*give a whole PNG or JPEG"),
        ({"type": "image", "image": "half.png"}, "cannot be used: .*give a whole PNG or JPEG"),
        ({"type": "image", "image": "a.gif"}, "cannot be used: .*give a whole PNG or JPEG"),
        ({"type": "image", "image": "large.png"}, f"has {MAX_BYTES + 1} bytes"),
        ({"type": "image", "image": "wide.png"}, "36000000 pixels, and the most is 33554432"),
        ({"type": "image", "image": "strip.png"}, "its sides are 2 and 401 pixels, .* at most 200"),
        ({"type": "image_url", "image_url": "https://a.b/c.png"}, "not fetched over the network"),
        ({"type": "image_url", "image_url": "data:image/png;base64,@"}, "cannot be read"),
        ({"type": "audio", "audio": "a.wav"}, "is no picture; write"),
        ({"type": "image"}, "is no picture; write"),
    ],
)
def test_picture_that_cannot_be_used_is_refused_by_one_message(tmp_path, part, why):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "half.png").write_bytes(picture(0, 100, 100)[:-100])
    (tmp_path / "a.gif").write_bytes(picture(0, kind="GIF"))
    (tmp_path / "large.png").write_bytes(bytes(MAX_BYTES + 1))
    if part.get("image") == "wide.png":
        (tmp_path / "wide.png").write_bytes(blank(6000, 6000))
    (tmp_path / "strip.png").write_bytes(blank(401, 2))
    with pytest.raises(ValueError, match=f"^questions.jsonl, line 7: .*{why}"):
        source_of(part, tmp_path, "questions.jsonl, line 7")


def blank(height, width):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()
