#!/usr/bin/env -S python3 -IS
"""A kubectl for tests: it replays what a cluster writes, and notes how it was called.

The folder in FAKE_CLUSTER holds the script. `pods.json` is a list of steps: an update of a pod, or
{"fails": TEXT}, with which this run of the watch ends. The next run lists the pods anew and goes on. Logs
are in `POD.log`; they end when the script does.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CLUSTER = Path(os.environ["FAKE_CLUSTER"])


def main(words: list[str]) -> int:
    with (CLUSTER / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    match words:
        case ["get", "pods", *_]:
            return watch()
        case ["get", "events", *_]:
            for event in load("events.json"):
                write("ADDED", event)
            sleep_until("gone")
        case ["get", *_]:
            print("\n".join(load("existing.json")))
        case ["create", option, *_]:
            if (CLUSTER / "refusal").exists():
                return refuse((CLUSTER / "refusal").read_text())
            for path in Path(option.partition("=")[2]).iterdir():
                (CLUSTER / "created").mkdir(exist_ok=True)
                (CLUSTER / "created" / path.name).write_text(path.read_text())
        case ["logs", _, pod]:
            sleep_until("played")
            print((CLUSTER / f"{pod}.log").read_text(), end="")
        case ["delete", *_]:
            (CLUSTER / "deleted").touch()
            if (CLUSTER / "undeletable").exists():
                return refuse((CLUSTER / "undeletable").read_text())
        case _:
            return refuse(f"unknown command {words}")
    return 0


def watch() -> int:
    """List the pods as they are, then play the rest of the script, then what a deletion does."""
    steps, position = load("pods.json"), CLUSTER / "position"
    start = int(position.read_text()) if position.exists() else 0
    pods: dict[str, Any] = {}
    for step in steps[:start]:
        if "object" in step:
            pods[step["object"]["metadata"]["uid"]] = step["object"]
    for pod in pods.values():
        write("ADDED", pod)
    for number, step in enumerate(steps[start:], start + 1):
        position.write_text(str(number))
        if "fails" in step:
            return refuse(step["fails"])
        pods[step["object"]["metadata"]["uid"]] = step["object"]
        write(step["type"], step["object"])
    (CLUSTER / "played").touch()
    sleep_until("deleted")
    for pod in pods.values():
        write("DELETED", pod)
    sleep_until("gone")
    return 0


def load(name: str) -> list[Any]:
    path = CLUSTER / name
    return list(json.loads(path.read_text())) if path.exists() else []


def write(kind: str, found: dict[str, Any]) -> None:
    print(json.dumps({"type": kind, "object": found}, indent=4), flush=True)


def refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def sleep_until(name: str) -> None:
    """Wait for a file; the launcher ends who waits for none."""
    while not (CLUSTER / name).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
