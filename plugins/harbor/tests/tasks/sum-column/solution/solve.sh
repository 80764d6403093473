awk -F, 'NR > 1 { sum += $2 } END { print sum }' data/sales.csv > sum.txt
