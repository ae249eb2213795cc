"""Measure the classifier on held-out classes and held-out images of emoji-r's training set, a JSON line a seed.

Ten of the twenty classes are learned in lessons of 4, 3 and 3 with four fifths of their images; the other fifth is
fresh, and the images of the other ten classes are of no known class. The test set is not looked at.

Other novelty scores are compared on the same features, as our score was chosen.

    python tools/measure_classifier.py 0 1 2 > results/classifier.jsonl
    python tools/measure_classifier.py 0 1 2 evaluation=image evaluation_draws=5  # with other settings
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probprompt import ContinualClassifier
from probprompt.classifier.confidence import Gaussians, auroc, false_positive_rate, unit
from probprompt.classifier.statistics import Moments
from probprompt.data.emoji_r import EmojiR

LESSONS = (slice(0, 4), slice(4, 7), slice(7, 10))
Images = dict[str, list[NDArray[np.uint8]]]


def unknown_scores(
    known: tuple[Tensor, Tensor], fresh: Tensor, strange: Tensor, shrinkage: float
) -> dict[str, tuple[float, float]]:
    """AUROC and false-positive rate of scores that are fitted on known features (n, D) with their labels (n,)."""
    moments = Moments.zero(10, known[0].shape[1], known[0].device)
    for label in range(10):
        moments.add_class(label, known[0][known[1] == label])
    gaussians = Gaussians.of(moments, shrinkage)

    def nearest(features: Tensor) -> Tensor:
        return torch.cdist(features.double() @ gaussians.within, gaussians.means).amin(dim=1)

    scores = {"nearest class": nearest, "relative": gaussians.score}
    pairs = {name: (score(fresh), score(strange)) for name, score in scores.items()}
    return {name: (round(auroc(*pair), 4), round(false_positive_rate(*pair), 4)) for name, pair in pairs.items()}


def compare_scores(classifier: ContinualClassifier, learned: Images, fresh: Images, strange: Any) -> dict[str, Any]:
    """Several scores of novelty: of which features, of which length, how far covariances are shrunk."""
    predictor, names = classifier.predictor, classifier.classes
    width = predictor.model.backbone.width

    def look(images: list[NDArray[np.uint8]]) -> Tensor:
        return torch.cat([predictor.look(images[start : start + 128]) for start in range(0, len(images), 128)])

    parts = [look([image for name in names for image in of[name]]) for of in (learned, fresh)] + [look(strange)]
    labels = torch.tensor([label for label, name in enumerate(names) for _ in learned[name]])
    logits = [predictor.model.head(part) for part in parts[1:]]
    chances = [-(part / predictor.state.calibration.temperature).softmax(dim=1).amax(dim=1) for part in logits]
    found: dict[str, Any] = {
        "largest probability": (round(auroc(*chances), 4), round(false_positive_rate(*chances), 4))
    }
    readers = {"prompted": slice(0, width), "query": slice(width, 2 * width), "both": slice(0, 2 * width)}
    for reader, columns in readers.items():
        for length, view in (("as it is", lambda part: part), ("unit", unit)):
            seen = [view(part[:, columns]) for part in parts]
            for shrinkage in (0.01, 0.1, 0.3, 0.5):
                for score, value in unknown_scores((seen[0], labels), seen[1], seen[2], shrinkage).items():
                    found[f"{score}, {reader}, {length}, {shrinkage}"] = value
    return found


def measure(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
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
    classifier = ContinualClassifier(backbone="demo", device="cpu", seed=seed, **settings)
    seconds, error = [], None
    for lesson in LESSONS:
        report = classifier.learn({name: learned[name] for name in names[lesson]})
        seconds.append(round(report.seconds, 1))
        error = report.calibration_error
    begun = time.perf_counter()
    found = classifier.evaluate({name: fresh[name] for name in names[:10]}, unknown=strange)
    return {
        "seed": seed,
        **({"settings": settings} if settings else {}),
        "known": names[:10],
        "images": {"fresh": found.images, "unknown": found.unknown_images},
        "lesson_seconds": seconds,
        "evaluation_seconds": round(time.perf_counter() - begun, 1),
        "accuracy": round(found.accuracy, 2),
        "forgetting": found.forgetting and round(found.forgetting, 2),
        "calibration_error_told": error and round(error, 4),
        "calibration_error": round(found.calibration_error, 4),
        "temperature": round(classifier.predictor.state.calibration.temperature, 4),
        "auroc": found.auroc and round(found.auroc, 4),
        "fpr_at_95": found.fpr_at_95 and round(found.fpr_at_95, 4),
        "known_marked_percent": round(found.flagged, 2),
        "unknown_marked_percent": found.unknown_flagged and round(found.unknown_flagged, 2),
        **({} if settings else {"scores": compare_scores(classifier, learned, fresh, strange)}),
    }


if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    for argument in sys.argv[1:]:
        if "=" not in argument:
            print(json.dumps(measure(int(argument), chosen)), flush=True)
