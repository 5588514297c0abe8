"""Points and boxes: objects and counts of hand-made maps, and `pipeline.locate` in pixels of the image."""

import math
from dataclasses import replace

import pytest
import torch

from tiny import close, locating_model, picture, tiny_model, tiny_processor
from traffic_vlm.locating_traffic_vlm import TrafficVLMObjectTokens, find_objects, largest_look, peaks
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.serving.overlay import draw_objects


BOX, POINT = [0.1875, 0.0625, 0.4375, 0.5625], [0.3125, 0.3125]  # of the car in the third column and second row
PICTURE = picture(size=(80, 48))


@pytest.fixture(scope="module")
def vqa(processor):
    return TrafficVLMPipeline(model=locating_model(), processor=processor, device="cpu")


@pytest.fixture
def centers():
    """Centers [6,4,8] of two classes: no bus, a car of 0.9 beside a lower cell, and one of 0.6 at the right edge."""
    centers = torch.full((6, 4, 8), -9.0)
    centers[1, 1, 2], centers[1, 1, 3], centers[1, 3, 7] = (math.log(p / (1 - p)) for p in (0.9, 0.8, 0.6))
    centers[2:] = torch.tensor([math.log(0.25), math.log(0.5), 0.5, 0.25])[:, None, None]
    return centers


def test_an_object_is_the_highest_cell_around_it(centers):
    [(score, *place), edge] = find_objects(centers, 1, 0.5)
    assert score == pytest.approx(0.9)
    assert place == [pytest.approx(BOX), pytest.approx(POINT)]
    assert edge[1] == pytest.approx([0.8125, 0.5625, 1, 1])  # cut at the edges of the image
    assert len(find_objects(centers, 1, 0.7)) == 1 and find_objects(centers, 0, 0) == []


def test_of_boxes_that_overlap_by_half_the_best_stays(centers):
    centers[1, 1, 3], centers[1, 1, 4] = -9.0, math.log(0.8 / 0.2)  # a second peak of 0.8, two columns to the right
    centers[2] = math.log(0.75)  # boxes of 6 columns, which share 4 of 8
    assert [round(score, 4) for score, *_ in find_objects(centers, 1, 0.7)] == [0.9]
    centers[2] = math.log(0.5)  # boxes of 4 columns share 2 of 6
    assert [round(score, 4) for score, *_ in find_objects(centers, 1, 0.7)] == [0.9, 0.8]


def test_a_token_has_the_sums_of_peaks_and_the_look_of_the_largest_object(centers):
    x, y = (torch.arange(8) + 0.5) / 8, (torch.arange(4) + 0.5) / 4
    features = torch.stack(torch.broadcast_tensors(x[None], y[:, None]))[None]  # [1,2,4,8], the place of each cell
    heat, shape = peaks(centers[None, :2]), centers[None, 2:]
    look = largest_look(heat, shape, features)
    close(look, torch.tensor([[[0, 0], POINT]]))  # no bus; the mean in the box of the car is its middle
    corner = torch.zeros(1, 1, 4, 8)
    corner[..., 0, 1] = 1  # at 0.1875, 0.125: in the upper left part of the box alone
    assert largest_look(heat, shape, corner)[0, 1] > 0.05
    shape[0, :2, 3, 7] += 0.1  # the car of 0.6 is larger, but by less than the other one is likelier
    close(largest_look(heat, shape, features), look)
    shape[0, :2, 3, 7] += 0.9
    assert largest_look(heat, shape, features)[0, 1, 0] > 0.8

    tokens = TrafficVLMObjectTokens(2, 2, 5)
    sums = torch.tensor([[0, 0, 0, 0], [1.5, 0.9, 0, 0.6]])
    both = torch.cat([tokens.counts(sums.log1p()), tokens.look(tokens.look_norm(look[0]))], -1)
    shape[0, :2, 3, 7] -= 1.0
    given = centers[None].requires_grad_(), features.requires_grad_()
    found = tokens(*given)
    close(found[0], tokens.classes.weight + tokens.to_hidden(torch.nn.functional.gelu(both)))
    assert [grad is None for grad in torch.autograd.grad(found.sum(), given, allow_unused=True)] == [True, False]


def test_places_are_pixels_of_the_image(vqa, centers):
    encoded = replace(vqa.encode(PICTURE), centers=centers[None])
    car, edge = vqa.locate(encoded, size=PICTURE.size)
    assert car == {"label": "car", "score": 0.9, "box": [15, 3, 35, 27], "point": [25, 15]}
    assert edge["box"] == [65, 27, 80, 48] and vqa.locate(encoded, "bus") == []
    assert vqa.locate(encoded, ["car", "car"]) == vqa.locate(encoded, "car")
    with pytest.raises(ValueError, match=r"encoded at .* pixels: pass image_size"):
        vqa.locate(encoded, image_size=320)
    assert vqa.locate(encoded, ["car"])[0]["box"] == [48, 16, 112, 144]  # of 256 × 256, at which it was encoded
    boxes, count = draw_objects(vqa, PICTURE, encoded, ["car"])
    assert count == 2 and [boxes.getpixel((x, 24)) for x in (14, 15)] == [(0, 0, 0), (255, 255, 0)]


def test_a_region_is_located_as_its_crop(vqa, processor):
    region = (0.5, 0.25, 0.5, 0.75)  # from 40, 12
    expected = [
        found | {"box": [x0 + 40, y0 + 12, x1 + 40, y1 + 12], "point": [x + 40, y + 12]}
        for found in vqa.locate(PICTURE.crop((40, 12, 80, 48)))
        for (x0, y0, x1, y1), (x, y) in [(found["box"], found["point"])]
    ]
    own = TrafficVLMPipeline(model=vqa.model, processor=processor, device="cpu", region=region)
    encoded = vqa.encode(PICTURE, region)
    for objects in (
        vqa.locate(PICTURE, region=region),
        vqa.locate(encoded, region=region, size=PICTURE.size),
        own.locate(PICTURE),
        own.locate(own.encode(PICTURE), size=PICTURE.size),
    ):
        assert objects == [{k: v if k == "label" else pytest.approx(v) for k, v in one.items()} for one in expected]
    assert {found["label"] for found in expected} == {"bus", "car"}


def test_what_is_not_there_is_not_located(vqa, processor):
    """ "Is there a car?" decides, with the thresholds of the pipeline; a class that was not taught is reported."""
    strict = TrafficVLMPipeline(model=vqa.model, processor=processor, device="cpu", thresholds=0.6)
    assert vqa.locate(PICTURE) and not strict.locate(PICTURE)
    processor = tiny_processor(taught=[word for word in processor.taught if word not in ("bus", "buses")])
    strict = TrafficVLMPipeline(model=vqa.model, processor=processor, device="cpu", thresholds=0.6)
    assert {found["label"] for found in strict.locate(PICTURE)} == {"bus"}


def test_bad_input(vqa, processor):
    with pytest.raises(ValueError, match="locate takes one image, got 2"):
        vqa.locate(vqa.encode([PICTURE, PICTURE]))
    with pytest.raises(ValueError, match="of an encoded image, pass size="):
        vqa.locate(vqa.encode(PICTURE), region=(0, 0, 0.5, 1))
    with pytest.raises(ValueError, match="locate knows: bus, car; got 'zebra'"):
        vqa.locate(PICTURE, ["bus", "zebra"])
    with pytest.raises(ValueError, match="locate knows: bus, car; got 'zebra'"):
        vqa.model.locate(vqa.encode(PICTURE), "zebra")
    plain = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu")
    with pytest.raises(ValueError, match="locate knows: nothing, as this model has no center head"):
        plain.locate(PICTURE)
