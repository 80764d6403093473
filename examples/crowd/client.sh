# A client of the crowd in bash: reads "PATH<tab>JSON" lines, posts each JSON to the server at $ART, and prints the replies.
set -euo pipefail
while IFS=$'\t' read -r path body; do
  reply=$(curl --silent --show-error --fail-with-body "$ART$path" -H "authorization: Bearer $KEY" -H "content-type: application/json" --data-raw "$body")
  echo "${reply//$'\n'/ }"
done
