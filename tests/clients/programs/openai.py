import sys

from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
chat, responses = client.chat.completions, client.responses
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def user(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


print("models:", client.models.list().data[0].id)

print("chat:", chat.create(model="scripted", messages=user("Hello")).choices[0].message.content)

with chat.stream(model="scripted", messages=user("Hello")) as stream:
    print("stream:", "".join(event.delta for event in stream if event.type == "content.delta"))

tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
messages = user("Weather in Rome?")
message = chat.create(model="scripted", messages=messages, tools=[tool]).choices[0].message
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}]
print("tool:", chat.create(model="scripted", messages=messages, tools=[tool]).choices[0].message.content)

answer = chat.parse(model="scripted", messages=user("Describe Rome"), response_format=Weather)
print("object:", answer.choices[0].message.parsed.model_dump_json())

print("responses chat:", responses.create(model="scripted", input="Hello").output_text)

with responses.stream(model="scripted", input="Hello") as stream:
    print("responses stream:", "".join(event.delta for event in stream if event.type == "response.output_text.delta"))

tool = {"type": "function", "name": "weather", "parameters": schema, "strict": False}
first = responses.create(model="scripted", input="Weather in Rome?", tools=[tool])
call = next(item for item in first.output if item.type == "function_call")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
second = responses.create(model="scripted", input=[output], previous_response_id=first.id, tools=[tool])
print("responses tool:", second.output_text)

answer = responses.parse(model="scripted", input="Describe Rome", text_format=Weather)
print("responses object:", answer.output_parsed.model_dump_json())
