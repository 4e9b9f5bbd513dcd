"""Prints the evaluations of several runs as one table, epoch by epoch.

python examples/compare_runs.py runs/distilled runs/labels
"""

import sys
from pathlib import Path

from student.display import table
from student.metrics import read_metrics


def main(folders: list[str]) -> int:
    rows = []
    for folder in folders:
        path = Path(folder) / "evaluations.jsonl"
        if not path.exists():
            sys.exit(f"{path} does not exist: is {folder} a run of `stillroom train`?")
        rows += [{"name": Path(folder).name, **line} for line in read_metrics(path)]
    print(table(sorted(rows, key=lambda row: (row["step"], row["name"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
