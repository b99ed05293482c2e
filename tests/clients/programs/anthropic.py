import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int


@beta_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


client = Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
messages = client.messages
fields = {"model": "scripted", "max_tokens": 200, "system": "Be brief."}


def user(text):
    return [{"role": "user", "content": text}]


print("chat:", messages.create(messages=user("Hello"), **fields).content[0].text)

with messages.stream(messages=user("Hello"), **fields) as stream:
    print("stream:", "".join(stream.text_stream))

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
fields["tools"] = [{"name": "weather", "input_schema": schema}]
history = user("Weather in Rome?")
first = messages.create(messages=history, **fields)
call = next(block for block in first.content if block.type == "tool_use")
history.append({"role": "assistant", "content": first.content})
history += user([{"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}])
print("tool:", messages.create(messages=history, **fields).content[0].text)

del fields["tools"]
runner = client.beta.messages.tool_runner(messages=user("Weather in Rome?"), tools=[weather], **fields)
print("runner tool:", runner.until_done().content[0].text)

behavior = {"unsupported_request_behavior": "continue_unthreaded"}  # the package sends all messages
thread = client.beta.messages.thread(tools=[weather], **behavior, **fields)
for number in range(3):
    thread.append(*user("Weather in Rome?"))
    for turn in thread.tool_runner(stream=number > 0):
        last = turn.get_final_message() if number > 0 else turn
    print("thread tool:", last.content[0].text)
assert len(thread.messages) == 12  # a question, a call, its result and an answer in each turn

answer = messages.parse(messages=user("Describe Rome"), output_format=Weather, **fields)
print("object:", answer.parsed_output.model_dump_json())
