"""Files that stand where another should be: pointers of Git LFS, and pages of HTML."""

import re
from pathlib import Path

from decoder.errors import DecoderError

HEAD = 1024  # bytes at a file's start that tell

_POINTER = re.compile(rb"(\xef\xbb\xbf)?\s*version https://(git-lfs|hawser)")
_HTML = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--((?!-->).)*-->\s*)*<(!doctype\s+html|html)[\s>]",
    re.IGNORECASE | re.DOTALL,
)


def stand_in(head: bytes) -> str | None:
    """What a file is instead of itself and what to do, told by its first bytes.

    Args:
      head: the first `HEAD` bytes, or all if there are fewer.

    Returns:
      How a sentence goes on from the file's name, without its full stop; None if the
      file is neither a pointer nor a page.
    """
    if _POINTER.match(head):
        return (
            "is a pointer of Git LFS, which only says where the file's content is. Run "
            "`git lfs pull` in its repository, or download the file again"
        )
    if _HTML.match(head):
        return (
            "is an HTML page, such as servers send instead of a file. Download the file again, "
            "by its own address and logged in if it needs that"
        )
    return None


def refuse_stand_in(path: Path) -> None:
    """Raises `DecoderError` if a file of a model is a pointer or a page."""
    with path.open("rb") as file:
        found = stand_in(file.read(HEAD))
    if found:
        raise DecoderError(f"{path} {found}")
