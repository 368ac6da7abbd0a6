"""The colours of heat: one hue, from pale to deep in even steps, and the ink that can be read on each."""

import math

Colour = tuple[int, int, int]  # sRGB, 0 to 255

PALE, DEEP = (0.97, 0.012, 250.0), (0.40, 0.125, 260.0)  # OKLCH: lightness, chroma, hue in degrees
COARSE: tuple[tuple[int, Colour], ...] = (  # of a terminal's 256 colours, those on the same way, as even as they come
    (231, (255, 255, 255)),
    (153, (175, 215, 255)),
    (110, (135, 175, 215)),
    (67, (95, 135, 175)),
    (25, (0, 95, 175)),
)
PAPER, INK = (255, 255, 255), (0, 0, 0)


def shade(share: float) -> Colour:
    """The colour of a share from 0, pale, to 1, deep: equal shares apart look equally far apart, to every eye.

    The way is straight in OKLab (Ottosson 2020), and nearly all of it is lightness, which colour blindness leaves alone.
    """
    share = min(max(share, 0.0), 1.0)
    pale, deep = oklab(*PALE), oklab(*DEEP)
    lightness, a, b = (low + (high - low) * share for low, high in zip(pale, deep, strict=True))
    return srgb(lightness, a, b)


def coarse(share: float) -> tuple[int, Colour]:
    """The nearest of the few shades that a terminal of 256 colours has, by its number, and what it looks like."""
    return COARSE[round(min(max(share, 0.0), 1.0) * (len(COARSE) - 1))]


def ink(paper: Colour) -> Colour:
    """Dark or white, whichever can be read better on the paper."""
    return INK if contrast(INK, paper) >= contrast(PAPER, paper) else PAPER


def contrast(a: Colour, b: Colour) -> float:
    """The ratio of luminances, 1 to 21; text needs 4.5 (WCAG 2, section 1.4.3)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: Colour) -> float:
    """The relative luminance of an sRGB colour."""
    red, green, blue = (linear(part / 255) for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(part: float) -> float:
    """The light of a channel of sRGB, 0 to 1."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def oklab(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """OKLCH in straight axes."""
    return lightness, chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))


def srgb(lightness: float, a: float, b: float) -> Colour:
    """OKLab as sRGB."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    lights = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = (round(255 * min(max(encoded(light), 0.0), 1.0)) for light in lights)
    return red, green, blue


def encoded(light: float) -> float:
    """A channel of sRGB for an amount of light."""
    return 12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055
