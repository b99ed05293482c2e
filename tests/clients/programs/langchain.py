import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


def converse(model, stream):
    messages = [HumanMessage("Weather in Rome?")]
    for _ in range(2):
        answer, *more = model.stream(messages) if stream else [model.invoke(messages)]
        for chunk in more:
            answer += chunk
        messages.append(answer)
        messages += [weather.invoke(call) for call in answer.tool_calls]
    return answer.text.strip()


url = f"{sys.argv[1]}/v1"
fields = {"model": "scripted", "api_key": "unused", "max_retries": 0}
methods = [("json_schema", "Describe Rome"), ("function_calling", "Describe it"), ("json_mode", "Describe Rome")]
models = {
    "": ChatOpenAI(base_url=url, **fields),
    "responses ": ChatOpenAI(base_url=url, use_responses_api=True, **fields),
    "anthropic ": ChatAnthropic(base_url=sys.argv[1], **fields),
    "ollama ": ChatOllama(base_url=sys.argv[1], model="scripted", reasoning=True),
}
for prefix, model in models.items():
    print(f"{prefix}chat:", model.invoke([SystemMessage("Be brief."), HumanMessage("Hello")]).text)
    print(f"{prefix}stream:", "".join(chunk.text for chunk in model.stream("Hello")))
    print(f"{prefix}tool:", converse(model.bind_tools([weather]), stream=False))
    if prefix != "ollama ":  # it knows neither strict tools nor a choice
        print(f"{prefix}strict tool:", converse(model.bind_tools([weather], strict=True), stream=False))
    print(f"{prefix}streamed tool:", converse(model.bind_tools([weather]), stream=True))
    for choice in () if prefix == "ollama " else ("weather", "any"):
        (call,) = model.bind_tools([weather], tool_choice=choice).invoke("Weather in Rome?").tool_calls
        print(f"{prefix}{choice} call:", call["name"], call["args"]["city"])
    for method, question in methods[:2] if prefix == "anthropic " else methods:
        answer = model.with_structured_output(Weather, method=method).invoke(question)
        print(f"{prefix}{method} object:", answer.model_dump_json())

print("completions chat:", OpenAI(base_url=url, **fields).invoke("Hello"))
