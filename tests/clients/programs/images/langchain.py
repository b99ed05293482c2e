import base64
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url = f"{sys.argv[1]}/v1"
fields = {"model": "demo-vision", "api_key": "unused", "max_retries": 0, "temperature": 0}
models = {
    "": ChatOpenAI(base_url=url, **fields),
    "responses ": ChatOpenAI(base_url=url, use_responses_api=True, **fields),
    "anthropic ": ChatAnthropic(base_url=sys.argv[1], **fields),
}
for path in sys.argv[2:]:
    kind = path.rpartition(".")[2]
    with open(path, "rb") as file:
        image = {"type": "image", "base64": base64.b64encode(file.read()).decode(), "mime_type": f"image/{kind}"}
    message = HumanMessage([{"type": "text", "text": "What number is in the picture?"}, image])
    for prefix, model in models.items():
        print(f"{kind} {prefix}chat:", model.invoke([message]).text)
        print(f"{kind} {prefix}stream:", "".join(chunk.text for chunk in model.stream([message])))
