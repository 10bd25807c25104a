"""Pictures of ratios, for peers.py and plugin.py: one line a row, one dot a library or setting, on
a scale of powers of two. And which machine this is."""
import math
import os
import platform
import xml.sax.saxutils

LEFT, RIGHT, LINE, WIDTH = 250, 110, 19, 860


def machine():
    facts = {}
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                facts[name.strip()] = value.strip()
    except OSError:
        pass
    model = facts.get("model name", platform.processor() or platform.machine())
    if "cpu family" in facts:
        model += " (family %s, model %s)" % (facts["cpu family"], facts["model"])
    return "%s, %d processors, %s %s" % (model, os.cpu_count(), platform.system(),
                                         platform.machine())


def text(x, y, s, size=12, anchor="start", fill="#222222", weight="normal"):
    return ('<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" fill="%s" font-weight="%s">%s'
            "</text>" % (x, y, size, anchor, fill, weight, xml.sax.saxutils.escape(s)))


class Picture:
    """`colours` by name are given by a class that is derived from this one."""

    def __init__(self, ratios):
        self.low = math.floor(math.log2(min(ratios + [1.0])))
        self.high = max(math.ceil(math.log2(max(ratios))), self.low + 3)
        self.out, self.y = [], 92

    def x(self, ratio):
        share = (math.log2(ratio) - self.low) / (self.high - self.low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def title(self, title, below, last):
        """last: what the numbers at the end of lines are."""
        self.out += [text(20, 28, title, 17, weight="bold"), text(20, 48, below, fill="#555555"),
                     text(WIDTH - 20, 70, last, 12, "end", "#555555")]

    def legend(self, labels):
        x = 20
        for name, label in labels.items():
            self.out.append('<circle cx="%d" cy="66" r="5" fill="%s"/>' % (x + 5,
                                                                           self.colours[name]))
            self.out.append(text(x + 16, 70, label))
            x += 30 + 7 * len(label)

    def section(self, title, lines):
        """lines: pairs of a label and its dots, which are pairs of a name and a ratio."""
        self.out.append(text(20, self.y + 6, title, 13, weight="bold"))
        self.y += 14
        top = self.y
        self.y += LINE * len(lines)
        for k in range(self.low, self.high + 1):
            x = self.x(2.0 ** k)
            self.out.append('<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>' % (
                x, top, x, self.y, "#222222" if k == 0 else "#dddddd"))
            self.out.append(text(x, self.y + 13, "%g x" % 2.0 ** k, 10, "middle", "#555555"))
        for i, (label, dots) in enumerate(lines):
            self.line(top + LINE * i + LINE / 2, label, dots)
        self.y += 40

    def line(self, y, label, dots):
        self.out.append(text(LEFT - 14, y + 4, label, 12, "end"))
        self.out.append('<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#eeeeee"/>' % (
            LEFT, y, WIDTH - RIGHT, y))
        for name, ratio in dots:
            self.out.append('<circle cx="%.1f" cy="%.1f" r="5" fill="%s" fill-opacity="0.9"/>' % (
                self.x(ratio), y, self.colours[name]))
        self.out.append(text(WIDTH - 20, y + 4, "%.2f x" % min(r for _, r in dots), 12, "end"))

    def text(self):
        height = self.y - 14
        return "\n".join([
            '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
            'font-family="sans-serif">' % (WIDTH, height, WIDTH, height),
            '<rect width="%d" height="%d" rx="8" fill="#ffffff"/>' % (WIDTH, height),
            *self.out, "</svg>", ""])
