echo one > 1; echo two > 2; echo three > 3
