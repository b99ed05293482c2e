"""Does a server answer as its APIs are defined? `python -m benchmarks.conformance URL --model NAME`

target     one server: a request, and its reply as JSON, events or lines      case      a case, and how it is run
openai     chat, completions, embeddings, models                              responses
anthropic  messages, count_tokens                                             ollama    generate, chat, tags, show

A case is there only if a specification or a maker's package defines what it checks. No case depends on what the model
knows: answers are compared with other answers of the same server. Standard library only.
"""
