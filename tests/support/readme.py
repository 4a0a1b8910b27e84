"""What stands in README: its indented blocks, and the commands of run.sh in any text."""
import re
import shlex


def blocks(text):
    """The indented blocks, without their indentation."""
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, re.M)
    return [re.sub(r"^    ", "", block, flags=re.M) for block in found]


def commands(text):
    """The words behind each ./run.sh that begins a command or stands in backticks; ("",) for none."""
    found = re.findall(r"(?:^[\w= :/.,]*|`)(?:exec )?\./run\.sh\b([^\n`#]*)", text, re.M)
    spaced = [re.split(r"  +", words)[0] if words.startswith(" ") else "" for words in found]
    return [tuple(shlex.split(words)) or ("",) for words in spaced]
