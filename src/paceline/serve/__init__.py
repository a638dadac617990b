"""The OpenAI-compatible server: HTTP in front of one engine in a thread of its own."""
