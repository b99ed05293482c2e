import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


async def main():
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="unused")
    for prefix, model in [("", OpenAIChatModel), ("responses ", OpenAIResponsesModel)]:
        model = model("scripted", provider=provider)
        agent = Agent(model, instructions="Be brief.")
        print(f"{prefix}chat:", (await agent.run("Hello")).output)
        async with agent.run_stream("Hello") as result:
            print(f"{prefix}stream:", [text async for text in result.stream_text()][-1])
        agent = Agent(model, tools=[weather])
        print(f"{prefix}tool:", (await agent.run("Weather in Rome?")).output.strip())
        agent = Agent(model, output_type=NativeOutput(Weather))
        print(f"{prefix}object:", (await agent.run("Describe Rome")).output.model_dump_json())
        agent = Agent(model, output_type=ToolOutput(Weather, name="Weather"))
        print(f"{prefix}called object:", (await agent.run("Describe it")).output.model_dump_json())


asyncio.run(main())
