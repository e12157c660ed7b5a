"""Line charts as SVG, by hand: a library would draw text as shapes, and could not follow a reader's dark mode.

A chart has its own background, and colours for light and dark by `prefers-color-scheme`. So it can be read on any page.
Each line ends in its name, in its colour and with its dash: no legend, and no reliance on colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 56, 52
LABEL_HEIGHT = 15
MAX_NAME = 26  # characters that fit right of the lines
MAX_LINES = 8

# Line colours, for light and dark. Both lists keep a contrast of 3:1 with their background.
LIGHT = ("#0b5fd0", "#c2410c", "#15803d", "#9333ea", "#be185d", "#0e7490", "#8a6d00", "#57606a")
DARK = ("#6cb0ff", "#ff9d5c", "#5bd98a", "#cfa3ff", "#ff85b8", "#4fd1e8", "#e3c341", "#a8b1bb")
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "6 2 1 2", "12 4", "6 2 2 2")


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    marks: tuple[float, ...] = ()  # where the ticks are, if not at round numbers


@dataclass(frozen=True)
class Line:
    name: str
    points: list[tuple[float, float]]
    dots: bool = True


def style() -> str:
    def rules(background: str, text: str, grid: str, colours: tuple[str, ...]) -> str:
        lines = [f".c{n}{{stroke:{colour}}} .f{n}{{fill:{colour}}}" for n, colour in enumerate(colours)]
        return f".back{{fill:{background}}} text{{fill:{text}}} .grid{{stroke:{grid}}} " + " ".join(lines)

    light = rules("#ffffff", "#24292f", "#d8dee4", LIGHT)
    dark = rules("#0d1117", "#e6edf3", "#30363d", DARK)
    return (
        "text{font:13px system-ui,sans-serif} .title{font-size:15px;font-weight:600} .line{fill:none;stroke-width:2} "
        f"{light} @media (prefers-color-scheme:dark){{{dark}}}"
    )


class Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: list[float], begin: float, end: float) -> None:
        self.axis, self._begin, self._end = axis, begin, end
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log:
            low, high = log10(low), log10(high)
            if not axis.marks:
                low, high = floor(low * 3 + 1e-9) / 3, ceil(high * 3 - 1e-9) / 3
        self._low, self._high = low, high if high > low else low + 1

    def __call__(self, value: float) -> float:
        at = log10(value) if self.axis.log else value
        return self._begin + (at - self._low) / (self._high - self._low) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self.axis.marks:
            return list(self.axis.marks)
        if self.axis.log:
            steps = (1,) if self._high - self._low > 2.5 else (1, 2, 5)
            ticks = [step * 10.0**power for power in range(floor(self._low), ceil(self._high) + 1) for step in steps]
            return [tick for tick in ticks if self._low - 1e-9 <= log10(tick) <= self._high + 1e-9]
        step = 10.0 ** floor(log10(self._high - self._low))
        step = next(step * part for part in (0.2, 0.5, 1, 2) if (self._high - self._low) / (step * part) <= 6)
        return [step * number for number in range(ceil(self._low / step), floor(self._high / step + 1e-9) + 1)]


def number(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def chart(title: str, lines: list[Line], across: Axis, up: Axis) -> str:
    """The text of an SVG file."""
    if not lines or len(lines) > MAX_LINES:
        raise ValueError(f"a chart has 1 to {MAX_LINES} lines, not {len(lines)}")
    points = [point for line in lines for point in line.points]
    x = Scale(across, [point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = Scale(up, [point[1] for point in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="t">',
        f'<title id="t">{escape(title)}</title>',
        f"<style>{style()}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text class="title" x="{LEFT - 40}" y="24">{escape(title)}</text>',
        f'<text x="{LEFT - 40}" y="44">{escape(up.label)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across.label)}</text>',
        *_grid(x, y),
    ]
    for at, (line, label) in enumerate(zip(lines, _labels(lines, y), strict=True)):
        parts += _line(at, line, label, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(x: Scale, y: Scale) -> list[str]:
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks():
        at = f"{y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{left} {at}H{right}"/>')
        parts.append(f'<text x="{left - 8}" y="{at}" dy="4" text-anchor="end">{number(tick)}</text>')
    for tick in x.ticks():
        at = f"{x(tick):.1f}"
        parts.append(f'<path class="grid" d="M{at} {top}V{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{number(tick)}</text>')
    return parts


def _line(at: int, line: Line, label: float, x: Scale, y: Scale) -> list[str]:
    pixels = [(f"{x(one):.1f}", f"{y(other):.1f}") for one, other in line.points]
    path = "M" + "L".join(" ".join(pixel) for pixel in pixels)
    dash = f' stroke-dasharray="{DASHES[at]}"' if DASHES[at] else ""
    parts = [f'<path class="line c{at}"{dash} d="{path}"/>']
    if line.dots:
        parts += [
            f'<circle class="f{at}" cx="{pixel[0]}" cy="{pixel[1]}" r="3"><title>{escape(line.name)}, '
            f"{number(point[0])}: {point[1]:,.4g}</title></circle>"
            for pixel, point in zip(pixels, line.points, strict=True)
        ]
    right = WIDTH - RIGHT
    parts.append(f'<path class="line c{at}"{dash} d="M{right + 8} {label:.1f}h22"/>')
    parts.append(f'<text x="{right + 36}" y="{label:.1f}" dy="4">{escape(line.name)}</text>')
    return parts


def _labels(lines: list[Line], y: Scale) -> list[float]:
    """The height of each name: that of the end of its line, moved so that no two names overlap."""
    order = sorted(range(len(lines)), key=lambda at: y(lines[at].points[-1][1]))
    found = [0.0] * len(lines)
    lowest = TOP + 0.0
    for at in order:
        found[at] = lowest = max(lowest, y(lines[at].points[-1][1]))
        lowest += LABEL_HEIGHT
    overflow = max(0.0, max(found) - (HEIGHT - BOTTOM))
    below = HEIGHT - BOTTOM + 0.0
    for at in reversed(order) if overflow else ():
        found[at] = min(found[at], below)
        below = found[at] - LABEL_HEIGHT
    return found
