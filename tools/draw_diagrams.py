"""Draws the architecture diagrams of docs/diagrams; with `--check` it only compares them with the files.

Each diagram is a function that places boxes and arrows by hand on a canvas. The SVG files follow the reader's
light or dark theme and need no font and no script.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from rooms import FLOORS, wrong_imports

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "diagrams"
LINE = 16  # pixels from one line of text to the next
STYLE = """
  svg { background: #ffffff; }
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .label { font-size: 11px; fill: #59636e; }
  .note { font-size: 11px; fill: #59636e; }
  .halo { font-size: 11px; fill: #ffffff; stroke: #ffffff; stroke-width: 4px; }
  .box { fill: #f6f8fa; stroke: #818b98; }
  .accent { fill: #ddf4ff; stroke: #0969da; }
  .group { fill: none; stroke: #818b98; stroke-dasharray: 5 4; }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.4; }
  .life { stroke: #818b98; stroke-dasharray: 2 4; }
  marker path { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #f0f6fc; }
    .label { fill: #9198a1; }
    .note { fill: #9198a1; }
    .halo { fill: #0d1117; stroke: #0d1117; }
    .box { fill: #151b23; stroke: #656c76; }
    .accent { fill: #121d2f; stroke: #4493f8; }
    .group, .life { stroke: #656c76; }
    .arrow { stroke: #9198a1; }
    marker path { fill: #9198a1; }
  }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker>'
)
Point = tuple[float, float]


class Canvas:
    """SVG picture. Shapes are added one by one.

    Args:
        width, height: Size in pixels.
        title: Title, which screen readers read out.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{HEAD}</defs>",
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Write one line of text with its baseline at y.

        Text of kind "note" is outlined in the background colour, which hides lines that it crosses.
        """
        if kind == "note":  # twice: not every viewer knows paint-order
            self.text(x, y, words, "halo", anchor)
        name = f' class="{kind}"' if kind else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{name}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, lines: Sequence[str], kind: str = "box"
    ) -> None:
        """Draw a box with centred lines, the first of them as its title."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" class="{kind}"/>'
        )
        top = y + (h - LINE * len(lines)) / 2 + 12
        for number, line in enumerate(lines):
            self.text(x + w / 2, top + LINE * number, line, "label" if number else "title")

    def group(self, x: float, y: float, w: float, h: float, title: str) -> None:
        """Draw a dashed frame with a title at its upper left corner."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" class="group"/>'
        )
        self.text(x + 10, y + 18, title, "title", "start")

    def arrow(self, points: Sequence[Point], label: str = "", at: Point | None = None) -> None:
        """Draw an arrow through the points. The label is centred above the middle, or at the point `at`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" class="arrow" marker-end="url(#head)"/>')
        if label:
            (x0, y0), (x1, y1) = points[0], points[-1]
            x, y = at or ((x0 + x1) / 2, (y0 + y1) / 2 - 6)
            self.text(x, y, label, "note")

    def lifeline(self, x: float, top: float, bottom: float) -> None:
        """Draw the vertical line of a participant."""
        self._shapes.append(
            f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" class="life"/>'
        )

    def svg(self) -> str:
        """Return the picture as SVG text."""
        return "\n".join([*self._shapes, "</svg>", ""])


def processes() -> str:
    """Draw the processes of a job."""
    canvas = Canvas(960, 530, "The processes of a job")
    canvas.box(
        330, 20, 280, 68, ["Launcher", "supervisor, engine, console", "one per job"], "accent"
    )
    canvas.box(760, 26, 160, 56, ["Guard", "ends the job if the", "launcher dies"])
    canvas.arrow([(610, 54), (760, 54)], "starts")
    canvas.group(20, 150, 340, 180, "Workers: psfleet_worker")
    for number, x in enumerate((40, 200)):
        lines = [f"Worker {number}", "trainer script", "runtime", "stages (pipeline)"]
        canvas.box(x, 190, 140, 115, lines)
    canvas.group(530, 150, 410, 180, "Servers: psfleet_server")
    canvas.box(550, 190, 180, 115, ["Server 0", "shard", "coordinator", "snapshot coordinator"])
    canvas.box(790, 190, 130, 115, ["Server 1", "shard"])
    canvas.arrow([(730, 247), (790, 247)], "views")
    canvas.arrow([(420, 88), (200, 150)], "start, signals", (255, 116))
    canvas.arrow([(480, 88), (620, 150)], "start, signals", (505, 126))
    canvas.arrow([(700, 150), (560, 88)], "liveness signals", (695, 116))
    canvas.arrow([(340, 210), (550, 210)], "push, pull (to every server)", (445, 203))
    canvas.arrow([(550, 238), (340, 238)], "values")
    canvas.arrow([(340, 272), (550, 272)], "heartbeat, collectives, data")
    canvas.text(445, 292, "gRPC; on one host tensors", "note")
    canvas.text(445, 306, "in shared memory", "note")
    canvas.box(550, 410, 180, 60, ["Standby of server 0", "replica of its shard"])
    canvas.box(770, 410, 170, 60, ["Standby of server 1", "replica of its shard"])
    canvas.arrow([(640, 305), (640, 410)], "records", (640, 372))
    canvas.arrow([(855, 305), (855, 410)], "records", (855, 372))
    canvas.box(40, 410, 300, 60, ["Disk", "logs of servers, snapshots, output"])
    canvas.arrow([(570, 305), (440, 440), (340, 440)], "log, snapshots", (440, 400))
    last = "Without launcher and servers the same script trains embedded: a shard inside its own process."
    canvas.text(480, 510, last, "note")
    return canvas.svg()


def push_and_pull() -> str:
    """Draw the path of a push and of a pull."""
    canvas = Canvas(1040, 560, "The path of a push and of a pull")
    canvas.group(20, 20, 430, 520, "Worker")
    canvas.group(590, 20, 430, 520, "Server")
    worker = [
        ["Script", "optimizer step: gradients; model: ids"],
        ["Runtime", "checks shapes, dtypes and ids"],
        ["Routing", "sums repeated ids, splits ids by server"],
        ["Stream", "numbers pushes; joins a push and the next pull"],
        ["Server client", "one thread per server; retries the same bytes"],
    ]
    for number, lines in enumerate(worker):
        canvas.box(95, 55 + 95 * number, 280, 58, lines, "box" if number else "accent")
    server = [
        ["Kernel", "applies the rule to rows, or copies rows"],
        ["Tables", "find rows; admit and expire them"],
        ["Shard", "orders by sequence, round or clock"],
        ["Shard host", "one lock; performs the instructions"],
        ["RPC service", "decodes and checks the frame"],
    ]
    for number, lines in enumerate(server):
        canvas.box(690, 55 + 95 * number, 250, 58, lines, "accent" if number == 2 else "box")
    for top in (113, 208, 303, 398):
        canvas.arrow([(170, top), (170, top + 37)])
        canvas.arrow([(300, top + 37), (300, top)])
        canvas.arrow([(750, top + 37), (750, top)])
        canvas.arrow([(880, top), (880, top + 37)])
    for x, words in ((170, "gradients"), (300, "values")):
        canvas.text(x, 136, words, "note")
    for x, words in ((750, "event"), (880, "instruction")):
        canvas.text(x, 326, words, "note")
    canvas.arrow([(375, 452), (690, 452)], "frame: header, payload", (520, 444))
    canvas.arrow([(690, 478), (375, 478)], "outcome of a push, or pull response", (520, 494))
    canvas.text(520, 512, "payload in the message, or in shared memory (lane)", "note")
    canvas.box(605, 245, 64, 58, ["Journal"])
    canvas.arrow([(690, 274), (669, 274)])
    canvas.arrow([(637, 303), (637, 360)])
    canvas.text(637, 374, "log, standby", "note")
    return canvas.svg()


def snapshot() -> str:
    """Draw the steps of a snapshot."""
    canvas = Canvas(1010, 700, "How a snapshot is taken")
    names = {
        "asks": (95, "Script or schedule"),
        "lead": (290, "Snapshot coordinator"),
        "workers": (535, "Every worker"),
        "servers": (775, "Every server"),
        "disk": (945, "Disk"),
    }
    for key, (x, name) in names.items():
        width = 90 if key == "disk" else 160
        canvas.box(x - width / 2, 20, width, 36, [name], "accent" if key == "lead" else "box")
        canvas.lifeline(x, 56, 640)
    steps = [
        ("asks", "lead", "1  Take: full or delta"),
        ("lead", "servers", "2  Begin: number, folder"),
        ("lead", "workers", "3  number, in the reply to a heartbeat"),
        ("workers", "lead", "4  Ready: all workers have heard of it"),
        ("workers", "servers", "5  Mark: my last push before the cut"),
        (
            "servers",
            "servers",
            "6  has every push before the marks: cut; freeze tables (copy-on-write)",
        ),
        ("servers", "disk", "7  write file"),
        ("workers", "lead", "8  Keep: worker state"),
        ("servers", "lead", "9  Finish: cut made, then file on disk with checksums"),
        ("lead", "disk", "10  write the manifest, rename the folder"),
        ("lead", "servers", "11  Settle: complete; remove older logs"),
        ("lead", "asks", "12  number and path"),
    ]
    for number, (source, target, label) in enumerate(steps):
        y = 92 + 46 * number
        start, end = names[source][0], names[target][0]
        if source == target:
            canvas.text(start - 10, y + 26, label, "note", "end")
            canvas.box(start - 5, y + 10, 10, 24, [])
        else:
            canvas.arrow([(start, y + 14), (end, y + 14)])
            canvas.text((start + end) / 2, y + 8, label, "note")
    last = (
        "Training goes on throughout. Sync mode needs no marks: the servers wait between two rounds",
        "for one exchange of messages and then all cut after the same round.",
    )
    for number, line in enumerate(last):
        canvas.text(505, 664 + 18 * number, line, "note")
    return canvas.svg()


def house() -> str:
    """Draw the rooms, the packages of the library, floor by floor; `tools/rooms.py` defines both."""
    width, height, gap = 880, 62, 12
    floors = list(reversed(FLOORS))
    canvas = Canvas(width, 20 + len(floors) * (height + gap) + 24, "The rooms of psfleet/")
    for number, floor in enumerate(floors):
        room_width = (width - 40 - gap * (len(floor) - 1)) / len(floor)
        for column, (room, words) in enumerate(floor.items()):
            x, y = 20 + column * (room_width + gap), 20 + number * (height + gap)
            kind = "accent" if room.startswith("core.") else "box"
            canvas.box(x, y, room_width, height, [room.replace(".", "/"), *words], kind)
    canvas.text(width / 2, 20 + len(floors) * (height + gap) + 8, BELOW, "note")
    return canvas.svg()


BELOW = (
    "A room imports rooms of lower floors alone. Blue rooms are internal, all others are public."
)

DIAGRAMS: dict[str, Callable[[], str]] = {
    "processes.svg": processes,
    "push-and-pull.svg": push_and_pull,
    "rooms.svg": house,
    "snapshot.svg": snapshot,
}


def main() -> int:
    """Write the files.

    With `--check`, print which files differ and which imports break the order of the floors.
    """
    parser = argparse.ArgumentParser(description="Draw the diagrams of the documents.")
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; fail if a file differs."
    )
    check = parser.parse_args().check
    stale = []
    for name, draw in DIAGRAMS.items():
        path, text = FOLDER / name, draw()
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    wrong = wrong_imports() if check else []
    for line in wrong:
        print(line, file=sys.stderr)
    for name in stale:
        print(f"docs/diagrams/{name} is stale; run: make docs", file=sys.stderr)
    return 1 if stale or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
