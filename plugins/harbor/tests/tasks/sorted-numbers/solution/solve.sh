printf '%s\n' 10 9 100 | sort -n > numbers.txt
