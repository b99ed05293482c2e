import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


def model(**fields):
    fields |= {"model": "scripted", "api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "max_retries": 0}
    return OpenAILike(context_window=8192, is_chat_model=True, **fields)


async def use_tool(streaming):
    agent = FunctionAgent(tools=[weather], llm=model(is_function_calling_model=True), streaming=streaming)
    return str(await agent.run("Weather in Rome?")).strip()


question = [ChatMessage(role="user", content="Hello")]
print("chat:", model().chat(question).message.content)
print("stream:", "".join(chunk.delta for chunk in model().stream_chat(question)))
print("completion chat:", model().complete("Hello").text)
print("tool:", asyncio.run(use_tool(False)))
print("streamed tool:", asyncio.run(use_tool(True)))
structured = model(should_use_structured_outputs=True)
print("object:", structured.structured_predict(Weather, PromptTemplate("Describe Rome")).model_dump_json())
calling = model(is_function_calling_model=True)
print("called object:", calling.structured_predict(Weather, PromptTemplate("Describe it")).model_dump_json())
