import base64
import sys

from anthropic import Anthropic

client = Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
QUESTION = "What number is in the picture?"

for path in sys.argv[2:]:
    kind = path.rpartition(".")[2]
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": data}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
    options = {"model": "demo-vision", "messages": messages}
    create = options | {"max_tokens": 20}
    print(f"{kind} chat:", client.messages.create(**create).content[0].text)
    with client.messages.stream(**create) as stream:
        print(f"{kind} stream:", "".join(stream.text_stream))
    counted = client.messages.count_tokens(**options).input_tokens
    without = client.messages.count_tokens(model="demo-vision", messages=[{"role": "user", "content": QUESTION}])
    print(f"{kind} counted:", counted > without.input_tokens + 10)
