import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


openai = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
    client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    fields = {"model": "scripted", "response_model": Weather, "max_retries": 0}

    def ask(create, tools_question, mode=mode, fields=fields):
        question = tools_question if mode == "TOOLS" else "Describe Rome"
        return create(messages=[{"role": "user", "content": question}], **fields)

    print(f"{mode} object:", ask(client.create, "Describe it").model_dump_json())
    print(f"{mode} streamed object:", list(ask(client.create_partial, "Describe a part"))[-1].model_dump_json())
