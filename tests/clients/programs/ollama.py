import asyncio
import sys

import ollama

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}}


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

print("object:", client.chat(model, user("Describe Rome"), format=SCHEMA).message.content)

asynchronous = ollama.AsyncClient(host=sys.argv[1], trust_env=False)
print("asynchronous chat:", asyncio.run(asynchronous.chat(model, user("Hello"))).message.content)
