import asyncio
import sys

import agents
from openai import AsyncOpenAI
from pydantic import BaseModel

agents.set_tracing_disabled(True)


class Weather(BaseModel):
    city: str
    degrees: int


@agents.function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


async def run(question, stream, **fields):
    agent = agents.Agent(name="agent", instructions="Be brief.", **fields)
    if not stream:
        return (await agents.Runner.run(agent, question)).final_output
    result = agents.Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def main():
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
    for prefix, kind in [("", agents.OpenAIChatCompletionsModel), ("responses ", agents.OpenAIResponsesModel)]:
        model = kind(model="scripted", openai_client=client)
        print(f"{prefix}chat:", await run("Hello", False, model=model))
        print(f"{prefix}stream:", await run("Hello", True, model=model))
        print(f"{prefix}tool:", (await run("Weather in Rome?", False, model=model, tools=[weather])).strip())
        print(f"{prefix}streamed tool:", (await run("Weather in Rome?", True, model=model, tools=[weather])).strip())
        settings = agents.ModelSettings(tool_choice="required", temperature=0.0, max_tokens=200)
        fields = {"model": model, "tools": [weather], "model_settings": settings}
        print(f"{prefix}required tool:", (await run("Weather in Rome?", False, **fields)).strip())
        answer = await run("Describe Rome", False, model=model, output_type=Weather)
        print(f"{prefix}object:", answer.model_dump_json())


asyncio.run(main())
