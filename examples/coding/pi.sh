# pi as the agent of examples/coding_agent.py: what pi says is run as a command. /agent is a folder with this file and with pi
# (npm install --prefix FOLDER --ignore-scripts @mariozechner/pi-coding-agent@0.73.1).
#
#     bash pi.sh INSTRUCTION
mkdir -p ~/.pi/agent
cat > ~/.pi/agent/models.json <<JSON
{"providers": {"art": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY", "api": "openai-completions",
  "models": [{"id": "$OPENAI_MODEL", "contextWindow": 8192, "maxTokens": 256}]}}}
JSON
PI_OFFLINE=1 node /agent/node_modules/@mariozechner/pi-coding-agent/dist/cli.js \
  --print --no-session --provider art --model "$OPENAI_MODEL" "$1" | tee answer.sh
sh answer.sh
