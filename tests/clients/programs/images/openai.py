import base64
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
QUESTION = "What number is in the picture?"

for path in sys.argv[2:]:
    kind = path.rpartition(".")[2]
    with open(path, "rb") as file:
        url = f"data:image/{kind};base64,{base64.b64encode(file.read()).decode()}"
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
    options = {"model": "demo-vision", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    print(f"{kind} chat:", client.chat.completions.create(**options).choices[0].message.content)
    with client.chat.completions.stream(**options) as stream:
        print(f"{kind} stream:", "".join(event.delta for event in stream if event.type == "content.delta"))

    parts = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    options = {"model": "demo-vision", "input": [{"role": "user", "content": parts}], "temperature": 0}
    print(f"{kind} responses chat:", client.responses.create(**options).output_text)
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        print(f"{kind} responses stream:", text)
