word=$(printf 'Write the longest word of the instruction\n' | tr -cs 'a-zA-Z' '\n' | awk 'length > length(longest) { longest = $0 } END { print longest }')
echo "$word" > answer.txt; echo "${#word}" > length.txt
