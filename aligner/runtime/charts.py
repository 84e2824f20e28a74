"""Small charts as inline SVG text: no library, no script, readable at any width, in light and dark."""

import math
from dataclasses import dataclass
from html import escape
from typing import Mapping, Optional, Sequence

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
)  # Okabe and Ito's first


@dataclass(frozen=True)
class Series:
    """A line: points (x, y) in order of x. half_band: half the width of a band around each point."""

    label: str
    points: Sequence[tuple[float, float]]
    half_band: Optional[Sequence[float]] = None


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    span = high - low or abs(high) or 1.0
    rough = span / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def tick_label(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0e}" if abs(value) >= 1e6 or abs(value) < 1e-4 else f"{value:.6g}"


class Axes:
    """Maps data to the drawing and draws the frame."""

    def __init__(self, xs: Sequence[float], low: float, high: float):
        self.ticks_y = nice_ticks(low, high)
        self.low, self.high = self.ticks_y[0], self.ticks_y[-1]
        self.first, self.last = min(xs), max(max(xs), min(xs) + 1)
        inside = [t for t in nice_ticks(self.first, self.last, 6) if self.first <= t <= self.last and t == int(t)]
        self.ticks_x = inside or [self.first]

    def x(self, value: float) -> float:
        return round(LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM), 1)

    def frame(self) -> str:
        lines = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(t)}" y2="{self.y(t)}"/>'
            f'<text x="{LEFT - 6}" y="{self.y(t) + 4}" text-anchor="end">{tick_label(t)}</text>'
            for t in self.ticks_y
        ]
        lines += [
            f'<text x="{self.x(t)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick_label(t)}</text>'
            for t in self.ticks_x
        ]
        return "".join(lines)


def _svg(title: str, body: str, legend: Sequence[tuple[str, str]]) -> str:
    """A figure with a caption and a legend of (colour, label)."""
    marks = " ".join(f'<span class="key"><i style="background:{c}"></i>{escape(label)}</span>' for c, label in legend)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}<div class='legend'>{marks}</div></figure>"


def _line(axes: Axes, series: Series, colour: str) -> str:
    parts = []
    if series.half_band:
        upper = [f"{axes.x(x)},{axes.y(y + h)}" for (x, y), h in zip(series.points, series.half_band, strict=True)]
        lower = [f"{axes.x(x)},{axes.y(y - h)}" for (x, y), h in zip(series.points, series.half_band, strict=True)]
        parts.append(f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity="0.2"/>')
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in series.points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    if len(series.points) <= 60:
        parts += [f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="2.5" fill="{colour}"/>' for x, y in series.points]
    return "".join(parts)


def line_chart(title: str, lines: Sequence[Series]) -> str:
    """Lines over steps; "" where none has a point."""
    lines = [series for series in lines if series.points]
    if not lines:
        return ""
    bands = [(y, h) for s in lines for (_, y), h in zip(s.points, s.half_band or [0.0] * len(s.points), strict=True)]
    axes = Axes([x for s in lines for x, _ in s.points], min(y - h for y, h in bands), max(y + h for y, h in bands))
    body = axes.frame() + "".join(_line(axes, s, COLOURS[i % len(COLOURS)]) for i, s in enumerate(lines))
    return _svg(title, body, [(COLOURS[i % len(COLOURS)], s.label) for i, s in enumerate(lines)])


def stacked_bars(title: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]]) -> str:
    """One bar a step, made of the parts' values (not negative); "" where there is none."""
    if not steps or not parts:
        return ""
    totals = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
    axes = Axes([min(steps) - 0.5, max(steps) + 0.5], 0.0, max(totals) or 1.0)
    width = max(1.0, 0.8 * (axes.x(1) - axes.x(0)))
    body, below = [axes.frame()], [0.0] * len(steps)
    for part, (_, values) in enumerate(parts.items()):
        for i, step in enumerate(steps):
            top, bottom = axes.y(below[i] + values[i]), axes.y(below[i])
            below[i] += values[i]
            if bottom > top:
                left = axes.x(step) - width / 2
                rect = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}"'
                body.append(f'{rect} fill="{COLOURS[part % len(COLOURS)]}"/>')
    return _svg(title, "".join(body), [(COLOURS[i % len(COLOURS)], label) for i, label in enumerate(parts)])
