"""Tables of request fields: what happens to each. Bodies are read by them; docs/compatibility.md is made of them."""
