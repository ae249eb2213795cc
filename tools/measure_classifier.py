"""Measure the classifier on held-out classes and held-out images of emoji-r's training set, a JSON line a seed.

Ten of the twenty classes are learned in lessons of 4, 3 and 3 with four fifths of their images; the other fifth is
fresh, and the images of the other ten classes are of no known class. The test set is not looked at.

    python tools/measure_classifier.py 0 1 2 > results/classifier.jsonl
"""

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probprompt import ContinualClassifier
from probprompt.data.benchmarks import EmojiR

LESSONS = (slice(0, 4), slice(4, 7), slice(7, 10))
Images = dict[str, list[NDArray[np.uint8]]]


def measure(seed: int) -> dict[str, Any]:
    data = EmojiR().load(None)
    order = np.random.RandomState(seed).permutation(len(data.class_names))
    learned: Images = {}
    fresh: Images = {}
    for label in order:
        rows = np.random.RandomState([seed, label]).permutation(np.flatnonzero(data.train.labels == label))
        images = [data.train.read(int(row)) for row in rows]
        name, cut = data.class_names[label], len(rows) // 5
        fresh[name], learned[name] = images[:cut], images[cut:]
    names = list(learned)
    strange = [image for name in names[10:] for image in fresh[name] + learned[name]]
    classifier = ContinualClassifier(backbone="demo", device="cpu", seed=seed)
    seconds, told = [], None
    for lesson in LESSONS:
        report = classifier.learn({name: learned[name] for name in names[lesson]})
        seconds.append(round(report.seconds, 1))
        told = report.calibration_error
    begun = time.perf_counter()
    found = classifier.evaluate({name: fresh[name] for name in names[:10]}, unknown=strange)
    return {
        "seed": seed,
        "known": names[:10],
        "images": {"fresh": found.images, "unknown": found.unknown_images},
        "lesson_seconds": seconds,
        "evaluation_seconds": round(time.perf_counter() - begun, 1),
        "accuracy": round(found.accuracy, 2),
        "forgetting": found.forgetting and round(found.forgetting, 2),
        "calibration_error_told": told and round(told, 4),
        "calibration_error": round(found.calibration_error, 4),
        "temperature": round(classifier.predictor.state.calibration.temperature, 4),
        "auroc": found.auroc and round(found.auroc, 4),
        "fpr_at_95": found.fpr_at_95 and round(found.fpr_at_95, 4),
        "known_marked_percent": round(found.flagged, 2),
        "unknown_marked_percent": found.unknown_flagged and round(found.unknown_flagged, 2),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(measure(int(argument))), flush=True)
