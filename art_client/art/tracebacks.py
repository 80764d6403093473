"""Shortens the traceback of a rollout's error to the frames of the program itself, so that its reader sees their own line.

Frames of `art`, of the standard library and of installed packages are left out, also in the error's causes.
"""

import sysconfig
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import cast

OURS = frozenset({"art", "art_protocol", "art_compat"})
PACKAGES = frozenset({"site-packages", "dist-packages"})
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def shorten(error: BaseException, whole: TracebackType | None) -> None:
    """Leaves only the program's own frames in an error's traceback `whole`, and in the tracebacks of the error's causes. If
    a traceback has no such frame, the error keeps all frames, because the error would otherwise name no line of code. A
    cause keeps no frame then."""
    error.__traceback__ = own_frames(whole) or whole
    seen, waiting = {id(error)}, _behind(error)
    while waiting:
        cause = waiting.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = own_frames(cause.__traceback__)
            waiting += _behind(cause)


def _behind(error: BaseException) -> list[BaseException]:
    """The errors that Python prints with an error: its cause and context, and the members of a group."""
    members: Sequence[BaseException] = ()
    if isinstance(error, BaseExceptionGroup):
        members = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [cause for cause in (error.__cause__, error.__context__, *members) if cause is not None]


def own_frames(whole: TracebackType | None) -> TracebackType | None:
    """The traceback with the program's own frames only; None if there are none."""
    frames: list[TracebackType] = []
    while whole is not None:
        if is_own(whole.tb_frame):
            frames.append(whole)
        whole = whole.tb_next
    own: TracebackType | None = None
    for frame in reversed(frames):
        own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return own


def package_of(frame: FrameType) -> str:
    """The package of the frame's module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_own(frame: FrameType) -> bool:
    """Whether the frame is of the program itself."""
    file = frame.f_code.co_filename
    parts = file.replace("\\", "/").split("/")
    return not (
        # By name: in a checkout these packages are outside of site-packages.
        package_of(frame) in OURS
        # Python has parts of the standard library as frozen modules, without files.
        or file.startswith((STANDARD_LIBRARY, "<frozen "))
        or not PACKAGES.isdisjoint(parts)
    )
