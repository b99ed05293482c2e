"""What the server does with each request field: docs/compatibility.md is made of it, and tests try every row."""
