"""ART's lines for notebooks: the time, a word in color, the message. They are printed, not logged."""

import functools
import time


def _print(word: str, color: int, msg: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] \x1b[{color}m{word:<4}\x1b[0m  {msg}")


info = functools.partial(_print, "INFO", 34)
step = functools.partial(_print, "STEP", 36)
ok = functools.partial(_print, "OK", 32)
warn = functools.partial(_print, "WARN", 33)
err = functools.partial(_print, "ERR", 31)


def dim(msg: object) -> None:
    print(f"\x1b[2m{msg}\x1b[0m")
