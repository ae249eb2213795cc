"""`probprompt data`: datasets fetched and checked, as a user sees it."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from probprompt.cli.data import TransferScreen
from probprompt.data import verify
from probprompt.data.published import Cifar100, Cub200, Dataset, Figures, ImageNetR, Source, TuBerlin

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


def picture(colour: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (colour % 256, colour // 256, 0)).save(content, "PNG")
    return content.getvalue()


def tree(folder: Path, train: int = 4, test: int = 2, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    colour = 0
    for side, count in (("train", train), ("test", test)):
        for name in classes:
            (folder / side / name).mkdir(parents=True)
            for index in range(count):
                (folder / side / name / f"{index}.png").write_bytes(picture(colour))
                colour += 1
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-100 and TU-Berlin, as if they had been published with two classes."""
    monkeypatch.setattr(Cifar100, "figures", Figures(2, 8, 4, (4, 4), (2, 2), shared=1))
    monkeypatch.setattr(TuBerlin, "figures", Figures(2, 8, 2, (4, 4), (1, 1)))


# check


def test_a_dataset_as_published_is_well(tmp_path: Path, probprompt: Command, small: None) -> None:
    code, out, _ = probprompt("data", "check", tree(tmp_path / "cifar100"))
    assert code == 0, out
    assert f"cifar100 in {tmp_path / 'cifar100'}" in out and "classes: 2" in out
    assert "train: 8 images, 4 of each class" in out and "test: 4 images, 2 of each class" in out
    assert out.rstrip().endswith("all is well")


def test_counts_that_differ_from_the_published_are_trouble(tmp_path: Path, probprompt: Command, small: None) -> None:
    root = tree(tmp_path / "data")
    (root / "train" / "dog" / "1.png").unlink()
    code, out, _ = probprompt("data", "check", root, "--benchmark", "cifar100")
    assert code == 1
    assert "TROUBLE: train: 7 images, published are 8" in out
    assert "TROUBLE: train: published are 4 images of each class, but dog has 3" in out
    assert "TROUBLE: test" not in out and "2 kind(s) of trouble" in out


def test_another_number_of_classes_is_trouble(tmp_path: Path, probprompt: Command, small: None) -> None:
    root = tree(tmp_path / "cifar100", classes=("cat", "cow", "dog"))
    code, out, _ = probprompt("data", "check", root, "--quick")
    assert code == 1 and "TROUBLE: 3 classes, published are 2" in out


def test_unreadable_files_are_named(tmp_path: Path, probprompt: Command, small: None) -> None:
    root = tree(tmp_path / "cifar100")
    (root / "test" / "cat" / "0.png").write_bytes(picture(7)[:40])
    code, out, _ = probprompt("data", "check", root)
    assert code == 1 and "TROUBLE: 1 file(s) cannot be read: test/cat/0.png (" in out
    assert probprompt("data", "check", root, "--quick")[0] == 0, "which only counts"


def test_images_on_both_sides_are_trouble_beyond_what_was_published(
    tmp_path: Path, probprompt: Command, small: None
) -> None:
    root = tree(tmp_path / "cifar100")
    copy = Image.open(root / "train" / "cat" / "3.png")
    copy.save(root / "test" / "dog" / "1.png", compress_level=1)
    assert (root / "test" / "dog" / "1.png").read_bytes() != (root / "train" / "cat" / "3.png").read_bytes()
    code, out, _ = probprompt("data", "check", root)
    assert code == 0 and "note: 1 test image(s) are training images, too: test/dog/1.png = train/cat/3.png" in out
    (root / "test" / "dog" / "0.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    code, out, _ = probprompt("data", "check", root)
    assert code == 1 and "TROUBLE: 2 test image(s) are training images, too" in out
    assert "The published data has 1 of them" in out


@pytest.mark.parametrize("kind", [Cub200, ImageNetR, TuBerlin], ids=lambda kind: kind.name)
def test_images_on_both_sides_are_noted_where_nobody_knows_how_many_were_published(
    tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch, kind: type[Dataset]
) -> None:
    known = Figures(2, 8, 4, (4, 4), (2, 2), shared=kind.figures.shared)
    monkeypatch.setattr(kind, "figures", known)
    root = tree(tmp_path / kind.name)
    (root / "test" / "dog" / "1.png").write_bytes((root / "train" / "cat" / "3.png").read_bytes())
    code, out, _ = probprompt("data", "check", root)
    assert code == 0, out
    assert (
        "note: 1 test image(s) are training images, too: test/dog/1.png = train/cat/3.png. Whether the published data "
        "has as many is not known"
    ) in out


def test_a_folder_of_ones_own_is_checked_without_figures(tmp_path: Path, probprompt: Command) -> None:
    root = tree(tmp_path / "mine")
    code, out, _ = probprompt("data", "check", root)
    assert code == 0 and "classes: 2" in out and "published" not in out and "held out" not in out
    (root / "test" / "cat" / "0.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    (root / "train" / "cat" / "0.png").write_bytes((root / "train" / "cat" / "1.png").read_bytes())
    code, out, _ = probprompt("data", "check", root)
    assert code == 1
    assert "TROUBLE: 1 test image(s) are training images, too: test/cat/0.png = train/dog/0.png" in out
    assert "note: 1 image(s) of train are there more than once" in out


def test_a_folder_without_a_test_set_is_told_what_becomes_of_it(tmp_path: Path, probprompt: Command) -> None:
    root = tree(tmp_path / "mine") / "train"
    code, out, _ = probprompt("data", "check", root)
    assert code == 0 and "no test set is here: 20 % of each class are held out as one" in out
    for name in ("cat", "dog"):
        for place in ("indoors", "outdoors"):
            (tmp_path / "deep" / name / place).mkdir(parents=True)
            for file in (root / name).iterdir():
                (tmp_path / "deep" / name / place / file.name).write_bytes(file.read_bytes())
    _, out, _ = probprompt("data", "check", tmp_path / "deep")
    assert "note: the classes are cat, dog, whose images all lie in folders inside them" in out


def test_an_unreadable_file_of_ones_own_folder_is_named_with_its_side(tmp_path: Path, probprompt: Command) -> None:
    root = tree(tmp_path / "mine")
    (root / "test").rename(root / "val")
    (root / "val" / "cat" / "1.png").write_bytes(b"none")
    (root / "train" / "dog" / "0.png").write_bytes(b"none")
    code, out, _ = probprompt("data", "check", root)
    assert code == 1 and "TROUBLE: 2 file(s) cannot be read: train/dog/0.png (" in out and ", val/cat/1.png (" in out


def test_a_folder_without_sides_has_its_files_named_as_they_lie(tmp_path: Path, probprompt: Command) -> None:
    root = tree(tmp_path / "mine") / "train"
    (root / "cat" / "1.png").write_bytes(b"none")
    code, out, _ = probprompt("data", "check", root)
    assert code == 1 and "TROUBLE: 1 file(s) cannot be read: cat/1.png (" in out


@pytest.mark.parametrize("within", ["images", ""])
def test_another_part_of_imagenet_is_a_folder_of_ones_own(tmp_path: Path, probprompt: Command, within: str) -> None:
    """The training images of Tiny-ImageNet, say: 200 folders of WordNet's numbers."""
    for number in range(200):
        folder = tmp_path / "train" / f"n{number:08}" / within
        folder.mkdir(parents=True)
        for index in range(2):
            (folder / f"n{number:08}_{index}.JPEG").write_bytes(b"")
    code, out, _ = probprompt("data", "check", tmp_path / "train", "--quick")
    assert code == 0 and "classes: 200" in out and "imagenet-r" not in out


def test_a_folder_that_holds_a_dataset_under_its_name_is_that_dataset(
    tmp_path: Path, probprompt: Command, small: None
) -> None:
    tree(tmp_path / "sets" / "cifar100")
    code, out, _ = probprompt("data", "check", tmp_path / "sets")
    assert code == 0, out
    assert f"cifar100 in {tmp_path / 'sets' / 'cifar100'}" in out and "train: 8 images, 4 of each class" in out
    tree(tmp_path / "sets" / "tu-berlin")
    code, _, err = probprompt("data", "check", tmp_path / "sets")
    assert code == 2 and f"{tmp_path / 'sets'} holds 2 datasets: name one of" in err
    assert f"{tmp_path / 'sets' / 'cifar100'}, {tmp_path / 'sets' / 'tu-berlin'}" in err.replace("\n", " ")
    assert probprompt("data", "check", tmp_path / "sets", "--benchmark", "cifar100")[0] == 0


def test_imagenet_r_in_a_folder_of_its_name_is_told_without_its_lists(tmp_path: Path, probprompt: Command) -> None:
    for name in ("n00000001", "n00000002"):
        (tmp_path / "imagenet-r" / name).mkdir(parents=True)
        (tmp_path / "imagenet-r" / name / "art_0.jpg").write_bytes(b"")
    code, out, _ = probprompt("data", "check", tmp_path)
    assert code == 1 and f"TROUBLE: {tmp_path / 'imagenet-r'} has the class folders, but not the lists" in out
    assert f"probprompt data get imagenet-r --to {tmp_path};" in out


def test_what_cannot_be_listed_at_all_is_trouble(tmp_path: Path, probprompt: Command) -> None:
    code, out, _ = probprompt("data", "check", "cub200")
    assert code == 1 and "TROUBLE: cub200 is not on this machine" in out
    code, out, _ = probprompt("data", "check", tmp_path, "--benchmark", "tu-berlin")
    assert code == 1 and f"TROUBLE: {tmp_path} holds nothing that looks like tu-berlin. Accepted: (1)" in out
    assert "not on this machine" not in out


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("/no/such/place",), "is no folder"),
        ((".", "--benchmark", "cifar10"), "no published dataset is called 'cifar10': did you mean 'cifar100'?"),
        ((".", "--benchmark", "emoji-r"), "no published dataset is called 'emoji-r'"),
    ],
)
def test_mistakes_are_told_in_words(probprompt: Command, arguments: tuple[str, ...], problem: str) -> None:
    code, _, err = probprompt("data", "check", *arguments)
    assert code == 2 and problem in err


def test_lists_of_ones_own_are_said_to_be(tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageNetR, "figures", Figures(2, 2, 2, (1, 1), (1, 1)))
    for place, name in enumerate(("n00000001", "n00000002")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for index in range(2):
            (tmp_path / "set" / name / f"{index}.png").write_bytes(picture(2 * place + index))
    for index, side in enumerate(("train", "test")):
        (tmp_path / "set" / f"{side}.txt").write_text(f"n00000001/{index}.png\nn00000002/{index}.png\n")
    code, out, _ = probprompt("data", "check", tmp_path / "set")
    assert code == 0, out
    assert f"cut by {tmp_path / 'set' / 'train.txt'} and {tmp_path / 'set' / 'test.txt'}" in out
    for side, name in (("training", "train.txt"), ("test", "test.txt")):
        digest = hashlib.sha256((tmp_path / "set" / name).read_bytes()).hexdigest()
        assert f"note: the list of the {side} images is not the published one (sha256 {digest})" in out


def test_a_tree_that_should_have_lists_is_noted(
    tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageNetR, "figures", Figures(2, 8, 4, (4, 4), (2, 2)))
    code, out, _ = probprompt("data", "check", tree(tmp_path / "imagenet-r", classes=("n00000001", "n00000002")))
    assert code == 0 and "note: no lists say which images are for training" in out and "cannot be known" in out


@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_images_that_are_not_as_published_are_noted(
    tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    figures = Figures(2, 8, 4, (4, 4), (2, 2), encoding="lossless", size=(4, 4))
    monkeypatch.setattr(Cifar100, "figures", figures)
    root = tree(tmp_path / "cifar100")
    code, out, _ = probprompt("data", "check", root, *options)
    assert code == 0 and "note" not in out
    Image.new("RGB", (9, 7)).save(root / "test" / "dog" / "1.jpg", quality=20)
    (root / "test" / "dog" / "1.png").unlink()
    code, out, _ = probprompt("data", "check", root, *options)
    assert code == 0, "they can be used"
    assert "note: images are JPEG files, published are images without loss: they were encoded anew" in out
    assert "note: images have 9 x 7 pixels, published are 4 x 4: they were resized" in out


def test_a_single_image_of_another_size_is_found_where_all_are_read(
    tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_LOOKED", 1)
    monkeypatch.setattr(Cifar100, "figures", Figures(2, 8, 4, (4, 4), (2, 2), size=(4, 4)))
    root = tree(tmp_path / "cifar100")
    Image.new("RGB", (9, 7)).save(root / "train" / "dog" / "1.png")
    _, out, _ = probprompt("data", "check", root)
    assert out.count("note: images have 9 x 7 pixels, published are 4 x 4") == 1
    assert "note" not in probprompt("data", "check", root, "--quick")[1]


# get


def sketches(path: Path, images: int = 5) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for place, name in enumerate(("airplane", "flying bird")):
            for index in range(images):
                archive.writestr(f"png/{name}/{images * place + index}.png", picture(images * place + index))
    return path


def publish(archive: Path, monkeypatch: pytest.MonkeyPatch, url: str = "https://example.org/sketches_png.zip") -> Path:
    """Let an archive be the published one."""
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(TuBerlin, "sources", (Source(url, "sketches_png.zip", "md5", md5),))
    return archive


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the folder ``www``."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "www").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("terminal", [True, False])
def test_bytes_are_drawn_as_they_are_moved(terminal: bool) -> None:
    screen, drawn = TransferScreen(), io.StringIO()
    screen.console = Console(file=drawn, force_terminal=terminal, width=120)
    with screen.transfer("a.zip", 4000, done=1000):
        screen.advance(2000)
    assert ("3.0/4.0 kB" in drawn.getvalue()) is terminal
    assert ("a.zip: done" in drawn.getvalue()) is not terminal, "a line is enough where there is no terminal"


def test_an_archive_at_hand_is_put_in_its_place_and_checked(
    tmp_path: Path, home: Path, probprompt: Command, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = publish(sketches(tmp_path / "sketches_png.zip"), monkeypatch)
    code, out, err = probprompt("data", "get", "tu-berlin", "--file", archive)
    assert code == 0, out + err
    assert f"tu-berlin: {home / 'tu-berlin'}" in out and "all is well" in out
    assert (home / "tu-berlin" / "png" / "flying bird" / "7.png").is_file()
    code, out, _ = probprompt("data", "get", "tu-berlin")
    assert code == 0 and "already" in out
    code, out, _ = probprompt("data", "check", "tu-berlin")
    assert code == 0 and "train: 8 images, 4 of each class" in out


def test_a_mirror_is_asked_and_the_place_is_told(
    web: str, tmp_path: Path, probprompt: Command, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(sketches(tmp_path / "www" / "mirror.zip"), monkeypatch, f"{web}/gone.zip")
    code, _, err = probprompt("data", "get", "tu-berlin", "--to", tmp_path / "other")
    assert code == 2 and "answers 404" in err and "--url" in err
    code, out, err = probprompt("data", "get", "tu-berlin", "--to", tmp_path / "other", "--url", f"{web}/mirror.zip")
    assert code == 0, out + err
    assert "sketches_png.zip: done" in out and "unpacking: done" in out
    assert f"export PROBPROMPT_DATA={tmp_path / 'other'}" in out
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["tu-berlin"]


def test_what_was_fetched_but_is_not_as_published_is_trouble(
    tmp_path: Path, probprompt: Command, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = publish(sketches(tmp_path / "a.zip", images=10), monkeypatch)
    code, out, _ = probprompt("data", "get", "tu-berlin", "--file", archive)
    assert code == 1 and "TROUBLE: train: 16 images, published are 8" in out


def test_a_wrong_archive_is_refused_with_both_hashes(tmp_path: Path, probprompt: Command) -> None:
    archive = sketches(tmp_path / "a.zip")
    code, _, err = probprompt("data", "get", "cifar100", "--file", archive)
    assert code == 2 and "eb9058c3a382ffc7106e4002c42a8d85" in err
    assert hashlib.md5(archive.read_bytes()).hexdigest() in err


def test_only_published_datasets_can_be_got(probprompt: Command) -> None:
    code, _, err = probprompt("data", "get", "cub")
    assert code == 2 and "did you mean 'cub200'?" in err


def test_benchmarks_are_listed_with_what_is_here(home: Path, probprompt: Command) -> None:
    tree(home / "cifar100")
    code, out, _ = probprompt("list", "benchmarks")
    assert code == 0
    rows = {line.split()[0]: line.rstrip() for line in out.splitlines()}
    assert rows["cifar100"].endswith("10 tasks  yes") and rows["emoji-r"].endswith("5 tasks   packaged")
    for name in ("cub200", "imagenet-r", "tiny-imagenet", "tu-berlin"):
        assert rows[name].endswith("10 tasks  no")
    assert "by its path" in rows["FOLDER"] and "Hugging Face" in rows["hf:OWNER/NAME"]
    assert f"looked for in {home};" in out and "probprompt data get NAME" in out


def test_benchmarks_are_listed_without_a_home(probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    for variable in ("PROBPROMPT_DATA", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    code, out, _ = probprompt("list", "benchmarks")
    assert code == 0 and "cifar100" in out and "name the folder of datasets with PROBPROMPT_DATA" in out
