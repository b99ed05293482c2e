"""OpenAI's responses API: text in, text out, conversations that the server remembers for a while."""
