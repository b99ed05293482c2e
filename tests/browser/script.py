"""What the scripted model answers, by a text of the prompt."""

MARKDOWN = """<think>
The user wants to see **Markdown**.
</think>

A queue in which the *oldest* request ages into the next class:

```python
def effective_priority(priority: int, age: float) -> float:
    return priority - 0.1 * age
```

| Class | After 10 s |
|---|---|
| low | like normal |
| normal | like high |

1. New requests wait.
2. Old ones overtake, see [the paper](https://example.com/paper).
"""

HOSTILE = """<script>window.hacked = 1</script>
<img src="x" onerror="window.hacked = 1">
<div class="composer" style="position:fixed" onclick="window.hacked = 1">raw</div>

[bad](javascript:window.hacked=1) and [good](https://example.com/good) and `<b>code</b>` H<sub>2</sub>O

![a picture](https://example.com/picture.png)

<a href="https://example.com/raw" target="_self" id="main">raw link</a>
"""

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

SCRIPT = {
    "How do priorities age?": MARKDOWN,
    "Attack!": HOSTILE,
    "Count!": "word " * 1200,
    "Ponder!": "<think>\nWords.\n</think>\n\n" + "word " * 1200,
    "Wrong question": "A wrong answer.",
    "Right question": "A right answer.",
    "Weather in Rome?": CALL,
    "Sunny, 25 degrees": "It is sunny in Rome.",
    "Second chat": "Here too.",
}
