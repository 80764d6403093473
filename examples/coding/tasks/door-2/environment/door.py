"""A door that opens for one word."""

WORD = ""

print("open" if WORD == "maybe" else "shut")
