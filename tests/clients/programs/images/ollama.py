import sys

from ollama import Client

client = Client(host=sys.argv[1])
QUESTION = "What number is in the picture?"

print("sees:", "vision" in client.show("demo-vision").capabilities)
for path in sys.argv[2:]:
    kind = path.rpartition(".")[2]
    messages = [{"role": "user", "content": QUESTION, "images": [path]}]
    options = {"model": "demo-vision", "messages": messages, "options": {"temperature": 0}}
    print(f"{kind} chat:", client.chat(**options).message.content)
    print(f"{kind} stream:", "".join(part.message.content or "" for part in client.chat(**options, stream=True)))
    options = {"model": "demo-vision", "prompt": QUESTION, "images": [path], "options": {"temperature": 0}}
    print(f"{kind} generate chat:", client.generate(**options).response)
