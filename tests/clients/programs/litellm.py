import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a table of prices
import litellm

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}


def asked(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def converse(stream, **fields):
    messages = asked("Weather in Rome?")
    for _ in range(2):
        answer = litellm.completion(messages=messages, tools=[TOOL], tool_choice="auto", stream=stream, **fields)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "21 degrees"})
    return message.content.strip()


url = sys.argv[1]
os.environ["OLLAMA_API_BASE"] = url  # where LiteLLM asks whether the model takes tools
for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
    base = url if provider in ("anthropic", "ollama_chat") else f"{url}/v1"
    fields = {"model": f"{provider}/scripted", "api_base": base, "api_key": "unused", "max_retries": 0}
    answer = litellm.completion(messages=asked("Hello"), temperature=0, max_tokens=50, **fields)
    print(f"{provider} chat:", answer.choices[0].message.content)
    answer = asyncio.run(litellm.acompletion(messages=asked("Hello"), **fields))
    print(f"{provider} asynchronous chat:", answer.choices[0].message.content)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = litellm.completion(messages=asked("Hello"), **options, **fields)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]  # the usage has a chunk without choices
    print(f"{provider} stream:", "".join(delta.content or "" for delta in deltas))
    print(f"{provider} tool:", converse(stream=False, **fields))
    print(f"{provider} streamed tool:", converse(stream=True, **fields))
    if provider != "anthropic":  # there, LiteLLM asks for an object by a tool of its own
        answer = litellm.completion(messages=asked("Describe Rome"), response_format=FORM, **fields)
        print(f"{provider} object:", answer.choices[0].message.content)

answer = litellm.responses(model="openai/scripted", api_base=f"{url}/v1", api_key="unused", input="Hello")
print("responses chat:", answer.output[0].content[0].text)

fields = {"model": "anthropic/scripted", "api_base": url, "api_key": "unused", "max_tokens": 50}
answer = asyncio.run(litellm.anthropic.messages.acreate(messages=[{"role": "user", "content": "Hello"}], **fields))
print("messages chat:", answer["content"][0]["text"])
