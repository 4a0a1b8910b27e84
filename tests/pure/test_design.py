"""docs/design.md is held to the code: what it names exists."""
import re

from support import ROOT

TEXT = (ROOT / "docs" / "design.md").read_text()
WORDS = re.compile(r"`([^`]+)`")


def table(chapter):
    """The rows of the first table of a chapter, as lists of cells."""
    part = TEXT.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_files_and_folders_that_it_names_exist():
    named = {word for word in WORDS.findall(TEXT) if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|sh|jinja))", word)}
    assert len(named) > 25
    assert not [word for word in named if not (ROOT / word).exists()]


def test_flags_that_it_names_are_set_where_it_says():
    rows = table("What says that a stream has ended")
    assert rows
    for flag, where, setters, readers, _ in rows:
        flag, file = flag.strip("`"), where.strip("`")
        text = (ROOT / file).read_text()
        assert re.search(rf"\b{flag}\b( = |\(self\))", text), (flag, file)
        for word in WORDS.findall(setters + readers):
            if word.endswith(".py"):
                assert re.search(rf"\.{flag}\b", (ROOT / word).read_text()), (flag, word)
            else:
                assert re.search(rf"def {word.rpartition('.')[2]}\b", text), (flag, word, file)


PROMISED = "What is used without being promised"


def test_what_is_not_promised_is_used_there_and_in_the_canary():
    canary = (ROOT / "tests" / "pure" / "test_canary.py").read_text()
    rows = table(PROMISED)
    assert rows
    for attributes, files, _, _ in rows:
        users = "".join((ROOT / file).read_text() for file in WORDS.findall(files))
        for name in WORDS.findall(attributes):
            last = name.rpartition(".")[2]
            assert f'"{last}"' in canary and re.search(rf"\b{last}\b", users), (name, files)


def test_functions_that_it_names_exist():
    """`call.answer_whole` and `Answer.close`: what stands behind the dot is defined somewhere."""
    sources = "\n".join(path.read_text() for path in ROOT.glob("[a-z]*/**/*.py") if "tests" not in path.relative_to(ROOT).parts)
    sources += "\n".join(path.read_text() for path in ROOT.glob("*.py"))
    names = re.findall(r"`(?:\w+\.)?(\w+)(?:\(\w*\))?`", TEXT.split(PROMISED)[0])
    known = set(re.findall(r"\b\w+\b", sources))
    assert not [name for name in names if name not in known]


def test_it_is_short():
    assert len(TEXT.splitlines()) < 200
