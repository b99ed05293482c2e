import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import ollama

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}}


RECORDED = [
    {"content": "", "thinking": "I look "},
    {"content": "", "thinking": "it up."},
    {
        "content": "",
        "tool_calls": [{"id": "c", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}}],
    },
]


class Recorded(BaseHTTPRequestHandler):
    """Streams what a server of Ollama has said."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for number, fields in enumerate(RECORDED, 1):
            message = {"role": "assistant"} | fields
            line = {"model": "other", "message": message, "done": number == len(RECORDED)}
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *_):
        pass


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city
    """
    return "21 degrees"


def user(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


client = ollama.Client(host=sys.argv[1], trust_env=False)
model = client.list().models[0].model
print("models:", model.removesuffix(":latest"))
print("shown models:", client.ps().models[0].model.removesuffix(":latest"))
print("chat:", client.chat(model, user("Hello"), options={"num_ctx": 8192, "temperature": 0}).message.content)
print("stream:", "".join(chunk.message.content or "" for chunk in client.chat(model, user("Hello"), stream=True)))
print("generated chat:", client.generate(model, "Hello", system="Be brief.").response)
print("generated stream:", "".join(chunk.response for chunk in client.generate(model, "Hello", stream=True)))

messages = user("Weather in Rome?")
message = client.chat(model, messages, tools=[weather], think=True).message
output = weather(**message.tool_calls[0].function.arguments)
messages += [message, {"role": "tool", "content": output, "tool_name": "weather"}]
print("tool:", client.chat(model, messages, tools=[weather]).message.content)

with HTTPServer(("127.0.0.1", 0), Recorded) as other:
    threading.Thread(target=other.handle_request).start()
    begun = ollama.Client(host=f"http://127.0.0.1:{other.server_port}", trust_env=False)
    said = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in begun.chat("other", user("Weather in Rome?"), tools=[weather], think=True, stream=True):
        said.thinking += part.message.thinking or ""
        said.tool_calls += part.message.tool_calls or []
messages = [*user("Weather in Rome?"), said, {"role": "tool", "content": "20 degrees", "tool_name": "weather"}]
for _ in range(5):
    messages.append({"role": "user", "content": "Weather in Rome?"})
    call = client.chat(model, messages, tools=[weather], think=True).message
    messages += [call, {"role": "tool", "content": "21 degrees", "tool_name": "weather"}]
    parts = client.chat(model, messages, tools=[weather], stream=True)
    messages.append({"role": "assistant", "content": "".join(part.message.content or "" for part in parts)})
    print("recorded tool:", messages[-1]["content"])

print("object:", client.chat(model, user("Describe Rome"), format=SCHEMA).message.content)

asynchronous = ollama.AsyncClient(host=sys.argv[1], trust_env=False)
print("asynchronous chat:", asyncio.run(asynchronous.chat(model, user("Hello"))).message.content)
