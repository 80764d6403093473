"""Shortens the traceback of a rollout's error to the frames of the program itself, so that its reader sees their own line.

Frames of `art`, of the standard library and of installed packages are left out, also in the error's causes.
"""

import sysconfig
from collections.abc import Sequence
from types import TracebackType
from typing import cast

PACKAGES = frozenset({"site-packages", "dist-packages"})
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def shorten(error: BaseException, whole: TracebackType | None) -> None:
    """Leaves in an error's traceback `whole`, and in those of its causes, the program's own frames. A traceback
    without such a frame stays in the error, which would name no place without it, and is removed from a cause."""
    error.__traceback__ = own_frames(whole) or whole
    seen, waiting = {id(error)}, _behind(error)
    while waiting:
        cause = waiting.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = own_frames(cause.__traceback__)
            waiting += _behind(cause)


def _behind(error: BaseException) -> list[BaseException]:
    """What an error is printed with: its cause and context, and the members of a group."""
    members: Sequence[BaseException] = ()
    if isinstance(error, BaseExceptionGroup):
        members = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [each for each in (error.__cause__, error.__context__, *members) if each is not None]


def own_frames(whole: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are the program's."""
    frames: list[TracebackType] = []
    while whole is not None:
        if _is_own(whole):
            frames.append(whole)
        whole = whole.tb_next
    made: TracebackType | None = None
    for each in reversed(frames):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def _is_own(place: TracebackType) -> bool:
    file = place.tb_frame.f_code.co_filename
    package = place.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    parts = file.replace("\\", "/").split("/")
    return not (
        package in ("art", "art_protocol")
        or file.startswith((STANDARD_LIBRARY, "<frozen "))
        or not PACKAGES.isdisjoint(parts)
    )
