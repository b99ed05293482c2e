"""`mlxpaged chat`: a conversation in the terminal. It reads lines with prompt_toolkit and shows Markdown with rich."""
