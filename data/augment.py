"""Augmentation: an image and its scene, changed together, so that every answer still holds.

    (image, scene) → mirror → crop → light → weather → camera → (image, scene)

What a change hides becomes unknown in the scene (`HIDDEN`): nobody sees the color of a car in a gray picture. Other
changes are mild enough for colors to keep their names. Training uses `augment`, of the tower and of the full model;
the renderer uses `add_rain` and `change_light`.

Images are uint8 arrays [H,W,3]. Their size need not be that of the scene: the tower's frames are squeezed to squares.
"""

import cv2
import numpy as np

from .scene import SYNTHETIC, Scene


MIRRORED, MIRRORED_NUMBERS = 0.5, 0.2  # fraction of images that are mirrored: without and with values of signs
# Fraction of photographs, and of rendered scenes, that are cropped: a crop hides the number of lanes and the shape of
# the road, which only rendered scenes label.
CROPPED, CROPPED_RENDERED = 0.5, 0.3
MAX_ENLARGED = 1.25  # of an image or crop: blur would tell its source
MIN_SIDE = 0.6  # of a crop, as a fraction of the width and of the height
CLOSE_UP = (1.2, 3.0)  # side of a crop around a vehicle, as a multiple of the side of its box
GAMMA = 1.18  # at most: a middle gray changes by 12 %
CONTRAST = 0.15  # at most: the increase of the slope at middle gray
SATURATION = 0.15  # at most: change of the distance of a color from its gray
LIGHT_OF = ("color", "weather", "time of day", "road surface")  # what other light hides
FLAWS = 0.2  # chance of blur, the same of noise and of JPEG artifacts


def augment(
    image: np.ndarray,
    scene: Scene,
    rng: np.random.Generator,
    crops: bool = True,
    size: tuple[int, int] | None = None,
) -> tuple[np.ndarray, Scene]:
    """The image [H',W',3] and its scene after random changes: mirrored, cropped, in other light, by another camera.

    Args:
        crops: False keeps the whole image.
        size: (height, width) in pixels to resize the crop to; a crop is enlarged by `MAX_ENLARGED` at most.
    """
    has_numbers = any("value" in item.attributes for item in scene.objects)
    if rng.random() < (MIRRORED_NUMBERS if has_numbers else MIRRORED):
        image, scene = image[:, ::-1], scene.flipped()
    if crops and rng.random() < (CROPPED_RENDERED if scene.source == SYNTHETIC else CROPPED):
        close_up = window_around_largest(scene, rng) if size is None else None  # others must not be enlarged so much
        image, scene = crop(image, scene, close_up or random_window(scene, rng, size or (0, 0)))
    image = np.ascontiguousarray(image) if size is None else resize(image, size)
    for change, (chance, hidden) in HIDDEN.items():
        if rng.random() < chance:
            image, scene = change(image, rng), scene.without(*hidden)
    return change_light(image, rng), scene


def is_large_enough(width: int, height: int, size: tuple[int, int]) -> bool:
    """Whether `size` (height, width) enlarges an image of `width` × `height` pixels by at most `MAX_ENLARGED`."""
    return height * MAX_ENLARGED >= size[0] and width * MAX_ENLARGED >= size[1]


def random_window(scene: Scene, rng: np.random.Generator, size: tuple[int, int] = (0, 0)) -> tuple[int, int, int, int]:
    """A window (left, top, right, bottom) in pixels of the scene, of at least `MIN_SIDE` of the width and height.

    Args:
        size: (height, width) of an image; the window is not enlarged by more than `MAX_ENLARGED` to it.
    """
    low_width, low_height = (
        min(1.0, max(MIN_SIDE, side / MAX_ENLARGED / whole))
        for side, whole in ((size[1], scene.width), (size[0], scene.height))
    )
    width = max(1, round(scene.width * rng.uniform(low_width, 1)))
    height = max(1, round(scene.height * rng.uniform(low_height, 1)))
    left, top = int(rng.integers(scene.width - width + 1)), int(rng.integers(scene.height - height + 1))
    return left, top, left + width, top + height


def window_around_largest(scene: Scene, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
    """A window in the shape of the scene, `CLOSE_UP` times the box of an object that is known to be the largest.

    None if no object is.
    """
    box = next((item.box for item in scene.objects if item.is_largest), None)
    if box is None:
        return None
    sides = np.array([scene.width, scene.height])
    low, high = np.array(box[:2]), np.array(box[2:])
    window = sides * min(1.0, rng.uniform(*CLOSE_UP) * ((high - low) / sides).max())
    start = rng.uniform((high - window).clip(0), np.minimum(low, sides - window))
    (left, top), (right, bottom) = np.floor(start), np.minimum(np.ceil(start + window), sides)
    return int(left), int(top), int(right), int(bottom)


def crop(image: np.ndarray, scene: Scene, window: tuple[int, int, int, int]) -> tuple[np.ndarray, Scene]:
    """The part of an image and of its scene in a window (left, top, right, bottom) in pixels of the scene."""
    x, y = image.shape[1] / scene.width, image.shape[0] / scene.height
    left, top = int(window[0] * x), int(window[1] * y)
    right, bottom = max(round(window[2] * x), left + 1), max(round(window[3] * y), top + 1)
    return image[top:bottom, left:right], scene.cropped(*window)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image resized to `size` (height, width), without regard to its shape."""
    shrinks = image.shape[0] * image.shape[1] > size[0] * size[1]
    return cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def change_light(image: np.ndarray, rng: np.random.Generator, flaws: float = FLAWS) -> np.ndarray:
    """The image with other tones, as if from another camera; some images are also blurred, noisy or compressed.

    Tones change by at most a tenth of the range, without clipping, and hues hardly change. So white, silver, gray and
    black keep their names, and so do orange and yellow.

    Args:
        flaws: chance of blur, the same of noise and of JPEG artifacts.
    """
    tones = np.linspace(0, 1, 256) ** GAMMA ** rng.uniform(-1, 1)
    tones -= rng.uniform(-CONTRAST, CONTRAST) * np.sin(2 * np.pi * tones) / (2 * np.pi)  # black and white stay
    image = cv2.LUT(image, np.rint(255 * tones).astype(np.uint8))
    image = saturate(image, 1 + rng.uniform(-SATURATION, SATURATION))
    if rng.random() < flaws:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.3, 1.5))
    if rng.random() < flaws:
        deviation = rng.uniform(2, 12)
        noise = rng.standard_normal(image.shape, np.float32) * deviation
        image = (image + noise).clip(0, 255).astype(np.uint8)
    if rng.random() < flaws:
        _, coded = cv2.imencode(".jpg", image[..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(25, 90))))
        image = np.ascontiguousarray(np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))[..., ::-1])
    return image


def saturate(image: np.ndarray, factor: float) -> np.ndarray:
    """The image with the distance of each color from its gray multiplied; 0 is a gray picture."""
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, gray, 1 - factor, 0)


def make_gray(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image without colors."""
    return saturate(image, 0)


def darken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with a fraction of its light."""
    return cv2.LUT(image, np.rint(rng.uniform(0.2, 0.6) * np.arange(256)).astype(np.uint8))


def expose(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with tones multiplied and shifted, clipped at black and white."""
    tones = np.arange(256) * rng.uniform(0.65, 1.45) + rng.uniform(-30, 30)
    return cv2.LUT(image, tones.clip(0, 255).astype(np.uint8))


def add_haze(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image behind haze that is thicker at the top, where a road is farther away."""
    haze = np.linspace(rng.uniform(0.4, 0.85), rng.uniform(0.1, 0.5), len(image))[:, None, None]
    return (image * (1 - haze) + rng.uniform(150, 225) * haze).astype(np.uint8)


def add_rain(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with streaks of rain in one slant, which reflect its light."""
    height, width = image.shape[:2]
    layer, slant, light = np.zeros_like(image), rng.uniform(-0.3, 0.3), image.mean()
    for x, y, length, tone in rng.uniform((0, -0.1, 0.03, 0.2), (1, 1, 0.13, 0.7), (int(rng.integers(60, 160)), 4)):
        start = int(x * width), int(y * height)
        end = int(x * width + slant * length * height), int((y + length) * height)
        cv2.line(layer, start, end, (tone * light,) * 3, 1, cv2.LINE_AA)
    return cv2.add(image, layer)


# Changes that hide something: their chance, and the attributes that become unknown
HIDDEN = {
    darken: (0.08, LIGHT_OF),
    expose: (0.15, LIGHT_OF),
    make_gray: (0.04, ("color", "state", "weather", "red light", "yellow light", "green light")),
    add_haze: (0.03, ("color", "weather", "glare")),
    add_rain: (0.03, ("weather", "road surface")),
}
