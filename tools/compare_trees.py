"""Compare what two source trees learn: `python tools/compare_trees.py OLD NEW`, each a checkout of this repository.

Trains every method, every head and a classifier that learns, refines, forgets and renames, on a tiny backbone. Saved
tensors are named by their content, so equal lists of files are equal results, bit for bit.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {"image_size": 32, "epochs": 2, "batch_size": 8}
WORK = """
import json, sys
from pathlib import Path
import torch
import probprompt
from probprompt import methods
torch.set_num_threads(1)
sizes = json.loads(sys.argv[1])
found = {}
def run(name, method, **settings):
    sized = {**sizes, **settings}
    done = probprompt.train("images", method, tasks=3, out=f"runs/{name}", device="cpu",
        config={"backbone": {"name": "test_vit", "weights": "random"}}, **sized)
    files = sorted(path.name for path in done.model.glob("*.safetensors"))
    accuracy, inside = (json.loads((done.folder / f"{kind}.json").read_text()) for kind in ("accuracy", "diagnostics"))
    found[name] = [files, accuracy, {part: inside.get(part) for part in ("similarity", "relevance", "queries")}]
for method in methods.registered():
    run(method, method)
for kind in ("ridge", "lda", "nearest-mean", "normalized"):
    run(f"head {kind}", "probprompt", **{"head.kind": kind})
run("query", "probprompt", **{"head.kind": "ridge", "with_query": True, "layers": 2, "flip_average": True})
run("follow", "probprompt", **{"head.kind": "ridge", "head.compensate_drift": True, "training.adapt_tasks": 2})
images = {path.name: sorted(path.iterdir()) for path in sorted(Path("images").glob("*/"))}
first, second, third, *others = images
for preset in (None, "ridge"):
    classifier = probprompt.ContinualClassifier(backbone="test_vit", weights="random", device="cpu", epochs=2,
        preset=preset, image_size=32, projections=50, evaluation="sample")
    classifier.learn({name: images[name][:4] for name in (first, second, third)})
    classifier.learn({name: images[name] for name in others})
    classifier.learn({first: images[first][4:]}, existing="extend")
    classifier.forget(second)
    classifier.rename(third, "renamed")
    classifier.save(f"model-{preset}")
    names = sorted(path.name for path in Path(f"model-{preset}").rglob("*.safetensors"))
    answers = classifier.predict([image for each in images.values() for image in each])
    answers = [(answer.label, round(answer.probability, 4), answer.novelty) for answer in answers]
    found[f"classifier {preset}"] = [names, answers]
Path("found.json").write_text(json.dumps(found))
"""


def learn(tree: Path) -> dict[str, object]:
    """Run everything with the sources of a tree and return files and numbers by name."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"PYTHONPATH": str(tree / "src"), "PROBPROMPT_CACHE": folder}
        sample = (sys.executable, "-m", "probprompt", "data", "sample", "images", "--classes", "6", "--images", "6")
        subprocess.run(sample, cwd=folder, env=os.environ | paths, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-c", WORK, json.dumps(SIZES)], cwd=folder, env=os.environ | paths, check=True)
        found: dict[str, object] = json.loads((Path(folder) / "found.json").read_text())
        return found


def main() -> None:
    old, new = (learn(Path(tree).resolve()) for tree in sys.argv[1:3])
    for name in sorted({*old, *new}):
        print(f"{'same' if old.get(name) == new.get(name) else 'DIFFERS':8}{name}")
    sys.exit(old != new)


if __name__ == "__main__":
    main()
