"""The colors of heat: one hue, from pale to deep in even steps; two hues for signed values; a readable text color for each."""

import math

RGB = tuple[int, int, int]  # sRGB, 0 to 255

PALE, DEEP = (0.97, 0.012, 250.0), (0.40, 0.125, 260.0)  # OKLCH: lightness, chroma, hue in degrees
TERMINAL_SHADES: tuple[tuple[int, RGB], ...] = (  # the colors of a 256-color terminal along the ramp, as even as they come
    (231, (255, 255, 255)),
    (153, (175, 215, 255)),
    (110, (135, 175, 215)),
    (67, (95, 135, 175)),
    (25, (0, 95, 175)),
)
TERMINAL_BROWNS: tuple[tuple[int, RGB], ...] = (  # those of values below 0, as light as the blue ones
    (231, (255, 255, 255)),
    (223, (255, 215, 175)),
    (180, (215, 175, 135)),
    (137, (175, 135, 95)),
    (130, (175, 95, 0)),
)
PAPER, INK = (255, 255, 255), (0, 0, 0)
RAISES, LOWERS = (33, 102, 172), (179, 88, 6)  # of the largest values above and below 0, #2166ac and #b35806 (ColorBrewer)


def shade(share: float) -> RGB:
    """Return the color of a share from 0, pale, to 1, deep; equal differences look equal, to color-blind readers too.

    Interpolates linearly in OKLab (Ottosson 2020); nearly all of the change is lightness, which color blindness does not
    affect.
    """
    share = min(max(share, 0.0), 1.0)
    pale, deep = convert_to_oklab(*PALE), convert_to_oklab(*DEEP)
    lightness, a, b = (low + (high - low) * share for low, high in zip(pale, deep, strict=True))
    return convert_to_srgb(lightness, a, b)


def shade_signed(share: float) -> RGB:
    """Return the color of a share from -1, orange-brown, through 0, white, to 1, blue, which color-blind readers distinguish.

    Interpolates linearly in sRGB, in which these two lose lightness in steps that look even.
    """
    size = min(abs(share), 1.0)
    red, green, blue = (
        round(low + (high - low) * size) for low, high in zip(PAPER, RAISES if share > 0 else LOWERS, strict=True)
    )
    return red, green, blue


def find_terminal_shade(share: float) -> tuple[int, RGB]:
    """Return the nearest of the few shades of a 256-color terminal: its number and its color."""
    return TERMINAL_SHADES[round(min(max(share, 0.0), 1.0) * (len(TERMINAL_SHADES) - 1))]


def find_signed_terminal_shade(share: float) -> tuple[int, RGB]:
    """Return the nearest of the shades of a 256-color terminal to a share from -1, brown, to 1, blue: its number and color."""
    shades = TERMINAL_SHADES if share > 0 else TERMINAL_BROWNS
    return shades[round(min(abs(share), 1.0) * (len(shades) - 1))]


def choose_ink(paper: RGB) -> RGB:
    """Return black or white, whichever is more readable on the paper."""
    return INK if contrast(INK, paper) >= contrast(PAPER, paper) else PAPER


def contrast(a: RGB, b: RGB) -> float:
    """Compute the contrast ratio of two colors, 1 to 21; text needs 4.5 (WCAG 2, section 1.4.3)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: RGB) -> float:
    """Compute the relative luminance of an sRGB color."""
    red, green, blue = (linearize_channel(part / 255) for part in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linearize_channel(part: float) -> float:
    """Convert an sRGB channel, 0 to 1, to linear light."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def convert_to_oklab(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Convert OKLCH, with the hue in degrees, to OKLab."""
    return lightness, chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))


def convert_to_srgb(lightness: float, a: float, b: float) -> RGB:
    """Convert OKLab to sRGB."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    lights = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = (round(255 * min(max(encode_channel(light), 0.0), 1.0)) for light in lights)
    return red, green, blue


def encode_channel(light: float) -> float:
    """Convert linear light to an sRGB channel."""
    return 12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055
