"""For type checkers alone, which look for modules of `art` only in folders with such a file. A wheel does not have it."""
