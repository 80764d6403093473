cat > greet.sh <<'PROGRAM'
#!/bin/sh
echo "Hello, ${1:-world}!"
PROGRAM
