for file in logs/*.txt; do mv "$file" "${file%.txt}$SUFFIX"; done
