printf 'def double(number):\n    return number * 2\n' > double.py
