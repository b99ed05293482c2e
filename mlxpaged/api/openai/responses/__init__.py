"""OpenAI's responses API: conversations of messages, thinking, calls and their results, stored for a while."""
