word=$(tr -cs 'a-zA-Z' '\n' < /art/instruction.md | awk 'length > length(longest) { longest = $0 } END { print longest }')
echo "$word" > answer.txt; echo "${#word}" > length.txt
