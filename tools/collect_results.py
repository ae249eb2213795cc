"""Copy what a run proves (settings, hashes, versions, accuracy) into one small JSON file that can be committed.

python tools/collect_results.py RUN FILE.json
"""

import argparse
import json
from pathlib import Path


def collect(run: Path) -> dict[str, object]:
    """Join the record of a run and its outcome."""
    record = json.loads((run / "run.json").read_text())
    accuracy = json.loads((run / "accuracy.json").read_text())
    diagnostics = json.loads((run / "diagnostics.json").read_text())
    similarity = diagnostics.get("similarity", {})
    inside = {name: similarity[name] for name in ("mean", "initial_mean", "effective_rank") if name in similarity}
    return {**record, "accuracy": accuracy, "prompt_similarity": inside}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(collect(arguments.run), indent=1) + "\n")
