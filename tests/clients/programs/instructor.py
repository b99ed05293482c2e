import sys
from collections.abc import Iterable

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


openai = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
fields = {"model": "scripted", "max_retries": 0}


def user(text):
    return [{"role": "user", "content": text}]


for mode in ("TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON"):
    client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    whole, part = ("Describe it", "Describe a part") if "TOOLS" in mode else ("Describe Rome", "Describe Rome")
    answer = client.create(messages=user(whole), response_model=Weather, **fields)
    print(f"{mode} object:", answer.model_dump_json())
    parts = list(client.create_partial(messages=user(part), response_model=Weather, **fields))
    print(f"{mode} streamed object:", parts[-1].model_dump_json())

client = instructor.from_openai(openai, mode=instructor.Mode.PARALLEL_TOOLS)
for answer in client.create(messages=user("Describe it"), response_model=Iterable[Weather], **fields):
    print("PARALLEL_TOOLS object:", answer.model_dump_json())
