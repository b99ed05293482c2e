"""OpenAI's responses API: conversations of messages, thoughts, calls and their results, remembered for a while."""
